"""Numbers that lie in arrays, queues, and data classes with slots are compared, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backpack_capture import capture
from backpack_core import extend
from backpack_core.extensions import BatchGrad

VARIABLE = ContextVar[float]("VARIABLE")
VARIABLE.set(1.0)


@dataclass(slots=True)
class Slotted:
    k: float


def _set(holder: Any, value: float) -> None:
    holder.k = value


def _exchange(queue: Any, value: float) -> None:
    queue.append(queue.popleft() * value)


# What holds a number, how it is read, and how it is changed.
HOLDERS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any, float], None]]] = {
    "array": (
        np.ones(3),
        lambda held: torch.as_tensor(held, dtype=torch.float64),
        lambda held, value: held.fill(value),
    ),
    "entry": (np.ones(3), lambda held: float(held[1]), lambda held, value: held.fill(value)),
    "queue": (deque([1.0]), lambda held: held[0], _exchange),
    "slots": (Slotted(1.0), lambda held: held.k, _set),
    "variable": (VARIABLE, lambda held: held.get(), lambda held, value: held.set(value)),
}


class Scaled(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.held, self.read = nn.Linear(4, 3), held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.read(self.held)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", HOLDERS)
def test_numbers_that_objects_hold(name: str) -> None:
    held, read, write = HOLDERS[name]
    model, lossfunc = extend(Scaled(held, read)), extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.randint(3, (5,))
    for _ in range(7):
        step(x, y)
    assert step.holds(x, y)
    write(held, 2.0)
    assert not step.holds(x, y)
    assert torch.allclose(step(x, y), lossfunc(model(x), y).detach())
    write(held, 0.5 if name == "queue" else 1.0)
    assert step.holds(x, y)


POWER = {"of": 1.0}


def _powered(x: Tensor) -> Tensor:
    return x.abs() ** POWER["of"]


class Owner:
    def __init__(self) -> None:
        self.function_of_owner = _powered


# What holds a function, and how it is found there.
FUNCTIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "itself": (_powered, lambda held: held),
    "list": ([_powered], lambda held: held[0]),
    "dictionary": ({"a": {"b": _powered}}, lambda held: held["a"]["b"]),
    "object": (Owner(), lambda held: held.function_of_owner),
    "part": (partial(_powered), lambda held: held),
}


class Mapped(nn.Module):
    def __init__(self, held: Any, find: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.held, self.find = nn.Linear(4, 3), held, find

    def forward(self, x: Tensor) -> Tensor:
        return self.find(self.held)(self.layer(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("place", ["module", "step"])
def test_variables_of_functions_that_objects_hold(name: str, place: str) -> None:
    """A function that is not named itself reads a variable that changes."""
    held, find = FUNCTIONS[name]
    is_outside, inner = place == "step", [_powered]
    inner[0], outside = (lambda x: x), held
    made = Mapped(inner, lambda held: held[0]) if is_outside else Mapped(held, find)
    model, lossfunc = extend(made), extend(nn.MSELoss())

    def function(x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        loss: Tensor = lossfunc(find(outside)(output) if is_outside else output, y)
        return loss

    step = capture(function, model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.rand(5, 3)
    for _ in range(7):
        step(x, y)
    assert step.holds(x, y)
    POWER["of"] = 2.0
    try:
        assert not step.holds(x, y)
        assert torch.allclose(step(x, y), function(x, y).detach())
    finally:
        POWER["of"] = 1.0


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_negative_zero(is_listed: bool) -> None:
    read = lambda held: 1.0 if str(held) in ("0.0", "[0.0]") else 2.0  # noqa: E731
    model, lossfunc = extend(Scaled([0.0] if is_listed else 0.0, read)), extend(nn.MSELoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.rand(5, 3)
    for _ in range(7):
        step(x, y)
    model.held = [-0.0] if is_listed else -0.0
    assert torch.allclose(step(x, y), lossfunc(model(x), y).detach())


def test_a_long_array_is_not_made_a_constant() -> None:
    """It is not compared each time, so the engine runs steps that make a tensor of it."""
    held = np.ones(2**14)
    model, lossfunc = extend(Scaled(held, lambda held: torch.as_tensor(held)[:3])), nn.MSELoss()
    extend(lossfunc)
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.rand(5, 3)
    for _ in range(2):
        step(x, y)
    with pytest.warns(UserWarning, match="A captured step runs by the engine"):
        step(x, y)
    held.fill(2.0)
    assert torch.allclose(step(x, y), lossfunc(model(x), y).detach())
