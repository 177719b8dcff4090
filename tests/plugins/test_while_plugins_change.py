"""What one thread looks up while another one adds, removes or prefers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import LayerRule, backpack, extend, register, unregister
from backpack_core.extensions import BatchGrad
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import is_named, registry
from backpack_products.open_functions import OpenFunction, preferred_version
from backpack_products.product import DenseProduct, SampleProduct

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


class Toy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class ToyRule(LayerRule):
    module_types = (Toy,)

    def _jac_t_mat_prod(self, view: Any, mat: Tensor) -> Tensor:
        return 2 * mat


@pytest.fixture(autouse=True)
def _without_the_rule() -> Iterator[None]:
    yield
    if not registry.resolve(Toy()).is_fallback:
        unregister("toy")


def _meanwhile(function: Callable[[], Any]) -> None:
    """Call a function on another thread, and wait for it."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(30)


def _interrupted(method: Any, change: Callable[[], Any]) -> Any:
    """A method whose first answer for the module is out of date when it comes."""
    todo = [change]

    def answer(*given: Any) -> Any:
        found = method(*given)
        is_asked = any(each is Toy or isinstance(each, Toy) for each in given)
        if todo and is_asked:
            _meanwhile(todo.pop())
        return found

    return answer


def _add() -> None:
    register(ToyRule, "toy")


def _remove() -> None:
    unregister("toy")


@pytest.mark.parametrize("change", [_add, _remove])
def test_a_rule_that_is_out_of_date_is_not_kept(
    change: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if change is _remove:
        _add()
    slow = _interrupted(registry.resolve_type, change)
    monkeypatch.setattr(registry, "resolve_type", slow)
    registry.forget()
    before, after = registry.resolve(Toy()), registry.resolve(Toy())
    assert (before.is_fallback, after.is_fallback) == (change is _add, change is _remove)


@pytest.mark.parametrize("place", ["resolve", "resolve_type"])
def test_the_next_call_of_a_module_has_the_new_rule(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 3), Toy(), nn.Linear(3, 2)))
    registry.forget()
    monkeypatch.setattr(registry, place, _interrupted(getattr(registry, place), _add))
    rules = []
    for _ in range(2):
        seen: list[Any] = []
        value = model(torch.randn(4, 3)).square().sum()
        with backpack(BatchGrad(), observer=seen.append, check="never"):
            value.backward()
        rules.append([type(view.call.rule) for view in seen if type(view.module) is Toy])
    assert rules[1] == [ToyRule]


def test_the_version_of_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    @OpenFunction
    def which(product: SampleProduct) -> str:
        return "definition"

    def version(product: SampleProduct) -> str:
        return "version"

    def slow(*given: Any) -> Any:
        found = preferred_version(*given)
        if not which.has_version(DenseProduct):
            _meanwhile(lambda: which.register(version))
        return found

    version.__annotations__["product"] = DenseProduct
    monkeypatch.setattr("backpack_products.open_functions.preferred_version", slow)
    product = DenseProduct(torch.ones(1, 2, 3))
    assert [which(product) for _ in range(2)] == ["definition", "version"]


def test_a_table_that_grows_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "backpack_core.plugins.registry.is_named"
    ensure_loaded()
    monkeypatch.setattr(name, _interrupted(is_named, _add))
    assert registry.resolve_type(Toy).is_fallback
    assert not registry.resolve_type(Toy).is_fallback
