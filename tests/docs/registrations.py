"""What the code of pages registers is forgotten after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backpack_core.plugins.registration import manager
from backpack_core.plugins.registry import registry
from backpack_core.testing.isolation import reset


@contextmanager
def forgotten() -> Iterator[None]:
    """Forget all plugins after a block that changed which there are.

    Most code registers nothing, and to load all plugins again takes longer than most code.
    """
    before = manager.list_name_plugin()
    yield
    if manager.list_name_plugin() == before:
        registry.forget()
    else:
        reset()
