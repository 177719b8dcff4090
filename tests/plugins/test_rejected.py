"""What pluggy rejects is an error of this library, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from backpack_core import hookimpl, register, unregister
from backpack_core.errors import PluginError
from backpack_core.plugins.registration import manager


def with_unknown_argument() -> Any:
    def backpack_layer_rules(session: Any) -> list[Any]:
        return []

    return hookimpl(backpack_layer_rules)


def wrapper_that_does_not_yield() -> Any:
    def backpack_layer_rules() -> list[Any]:
        return []

    return hookimpl(backpack_layer_rules, wrapper=True)


def both_kinds_of_wrapper() -> Any:
    def backpack_layer_rules() -> Generator[None, Any, Any]:
        return (yield)

    return hookimpl(backpack_layer_rules, wrapper=True, hookwrapper=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_unknown_argument, "declared in the hookimpl but can not be found in the hookspec"),
        (wrapper_that_does_not_yield, "Declared as wrapper=True or hookwrapper=True but function"),
        (both_kinds_of_wrapper, "wrapper=True and hookwrapper=True"),
    ],
)
def test_a_wrong_hook(make: Callable[[], Any], words: str) -> None:
    plugin = SimpleNamespace(__name__="mine", backpack_layer_rules=make())
    with pytest.raises(PluginError, match="backpack_layer_rules") as caught:
        register(plugin, name="mine")
    assert words in str(caught.value)
    assert manager.get_name(plugin) is None
    plugin.backpack_layer_rules = hookimpl(lambda: [])
    register(plugin, name="mine")  # once it is mended
    unregister("mine")


def test_one_object_twice() -> None:
    plugin = SimpleNamespace(__name__="mine", backpack_layer_rules=hookimpl(lambda: []))
    register(plugin, name="mine")
    try:
        with pytest.raises(PluginError, match="is registered already, as 'mine'"):
            register(plugin, name="other")
    finally:
        unregister("mine")
    assert manager.get_name(plugin) is None
