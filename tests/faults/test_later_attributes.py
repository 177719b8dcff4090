"""Classes of modules that get attributes after some passes: a property stands for a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import capture
from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests.faults.test_patched_classes import _check

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


def _squared(layer: Any) -> Tensor:
    weight: Tensor = layer._parameters["weight"]
    return weight**2


def _own(layer: Any, name: str) -> Any:
    return _squared(layer) if name == "weight" else nn.Module.__getattr__(layer, name)


class _Line(nn.Linear):
    """A class that uses its parent's rule."""


class _Slope(nn.LeakyReLU):
    """Another one, whose rule reads a setting."""


LATER = {
    "weight_of_torch": (nn.Linear, nn.Tanh, nn.Linear, "weight", property(_squared)),
    "weight": (_Line, nn.Tanh, _Line, "weight", property(_squared)),
    "getattr": (_Line, nn.Tanh, _Line, "__getattr__", _own),
    "slope": (nn.Linear, _Slope, _Slope, "negative_slope", property(lambda layer: 0.5)),
}


def _net(name: str) -> tuple[nn.Module, nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    line, activation = LATER[name][:2]
    model = nn.Sequential(line(3, 4), activation(), nn.Flatten(), nn.Linear(4, 2))
    return (
        extend(model),
        extend(nn.CrossEntropyLoss()),
        lambda: (torch.randn(4, 3), torch.randint(2, (4,))),
    )


@pytest.mark.parametrize("passes", [1, 5, 19])
@pytest.mark.parametrize("name", LATER)
def test_an_attribute_of_a_class_that_comes_later(
    name: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pass would be measured, go by a plan, or repeat a recording."""
    model, lossfunc, data = _net(name)

    def step() -> tuple[Tensor, Tensor]:
        x, y = data()
        with backpack(BatchGrad(), DiagGGNExact()):
            lossfunc(model(x), y).backward()
        return x, y

    for _ in range(passes):
        step()
    with monkeypatch.context() as patched:
        patched.setattr(*LATER[name][2:], raising=False)
        _check(model, lossfunc, *step())
    _check(model, lossfunc, *step())


@pytest.mark.parametrize("name", LATER)
def test_a_captured_step_sees_an_attribute_that_comes_later(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lossfunc, data = _net(name)
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    for _ in range(8):
        step(*data())
    x, y = data()
    assert step.holds(x, y)
    monkeypatch.setattr(*LATER[name][2:], raising=False)
    step(x, y)
    _check(model, lossfunc, x, y)
