"""What is noted of a call is the same whether a module remembers it or not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import extend
from backpack_core.record.call import Call
from backpack_core.record.models import PATH_ATTRIBUTE
from backpack_operations.noted import MOST, Noted, noted_of
from backpack_products.values import look_of
from tests.core.test_recording import call_of

Change = Callable[[nn.Module], Any]  # what it returns undoes it; or it returns nothing


def _model() -> nn.Module:
    parts = nn.Conv2d(2, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)
    return extend(nn.Sequential(*parts))


def _take(name: str, where: int) -> Change:
    return lambda model: setattr(model[where], name, None)


def _frozen(model: nn.Module) -> None:
    model[1].weight.requires_grad_(False)


CHANGES: dict[str, Change] = {
    "nothing": lambda model: None,
    "mode": lambda model: model.eval(),
    "setting": lambda model: setattr(model[1], "eps", 0.1),
    "frozen": _frozen,
    "no bias": _take("bias", 1),
    "no weight": _take("weight", 1),
    "type": lambda model: model.double(),
    "path": lambda model: model[1].__dict__.update({PATH_ATTRIBUTE: "elsewhere"}),
    "memory": lambda model: model.to(memory_format=torch.channels_last),
    "other parameter": lambda model: setattr(model[1], "weight", nn.Parameter(torch.rand(2))),
}
DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "same": lambda x: x,
    "fewer": lambda x: x[:2],
    "other strides": lambda x: x.transpose(2, 3),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "wants a gradient": lambda x: x.clone().requires_grad_(),
}


def _calls(model: nn.Module, x: Tensor) -> list[Call]:
    found = []
    for part in model:
        x = part(x.to(model[0].weight.dtype) if part is model[0] else x)
        found.append(call_of(x))
    return found


def _anew(call: Call) -> Noted:
    stored = call.stored
    own = [tensor for tensor in stored.tensors.values() if tensor is not None]
    return Noted(call, [*stored.inputs, *stored.outputs, *own])


def _told(noted: Noted) -> Any:
    return noted.facts, noted.layouts, noted.parameters


@pytest.mark.parametrize("has_look", [True, False])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_remembers_right(
    change: str, data: str, has_look: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_look:
        monkeypatch.setattr(torch._C._dynamo, "guards", SimpleNamespace())
    model, x = _model(), torch.rand(3, 2, 6, 6)
    before = [*map(noted_of, _calls(model, x))]
    assert [*map(noted_of, _calls(model, x))] == before
    CHANGES[change](model)
    for _ in range(2):
        calls = _calls(model, DATA[data](x))
        assert [*map(_told, map(noted_of, calls))] == [*map(_told, map(_anew, calls))]


def test_what_was_frozen_after_the_forward_pass() -> None:
    model, x = _model(), torch.rand(3, 2, 6, 6)
    seen = set()
    for act in (lambda: None, lambda: _frozen(model), lambda: model.requires_grad_(True)):
        calls = _calls(model, x)
        act()
        assert _told(noted_of(calls[1])) == _told(_anew(calls[1]))
        seen.add(noted_of(calls[1]))
    assert len(seen) == 3  # wanted then and now, then alone, now alone


def test_equal_calls_are_one_object() -> None:
    linear = [extend(nn.Linear(2, 2)) for _ in range(2)]
    x = torch.rand(3, 2)
    assert len({noted_of(call_of(layer(x))) for layer in linear}) == 1
    assert len({noted_of(call_of(linear[0](x[:n]))) for n in (1, 2, 3)}) == 3


def test_other_numbers_of_inputs() -> None:
    cell, x = extend(nn.RNNCell(2, 2)), torch.rand(3, 2)
    calls = [call_of(cell(*inputs)) for inputs in ((x,), (x, x), (x,))]
    assert [noted_of(c) for c in calls] == [noted_of(c) for c in (calls[0], calls[1], calls[0])]
    assert len({*map(noted_of, calls)}) == 2


def test_few_are_remembered() -> None:
    linear = extend(nn.Linear(2, 2))
    for n in range(1, 2 * MOST):
        noted_of(call_of(linear(torch.rand(n, 2))))
    assert len(linear.__dict__["_backpack_traits"].noted) == MOST


def test_the_look_of_no_tensors() -> None:
    assert look_of([])()
