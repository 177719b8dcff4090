"""Captured steps of random nets: equal to the engine's, whatever is captured and what is not.

Every twelfth of ``--nets`` is drawn. For a long run of 5,000, on all cores,
``make test ARGS="--nets=60000 tests/capture/test_random_nets.py"``.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import CapturedStep, capture
from backpack_capture.nested import Apart
from backpack_core import backpack, extend
from backpack_core.errors import BackpackError
from tests.devices import rng_state
from tests.nets import losses
from tests.nets.draw import draw
from tests.nets.losses import Losses
from tests.nets.net import data
from tests.nets.passes import Whole
from tests.nets.quantities import QUANTITIES
from tests.nets.truth import fresh
from tests.nets.verdict import Prepared

BLOCKS = 5
SHARE = 12  # of the nets that the suite draws, one of so many
LARGEST_BLOCK = 50
STEPS = 8
CODE = {"HMP", "GGNMP", "PCHMP", "DiagHMP", "GGNGram"}  # it holds the graph


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Results that hold a graph are none of a capture's."""


class Side:
    """A net with its losses, and the steps that it makes."""

    def __init__(self, prepared: Prepared) -> None:
        self.recipe = prepared.recipe
        self.whole = Whole(copy.deepcopy(prepared.net), copy.deepcopy(prepared.losses))
        for module in (self.whole.net, *self.whole.losses.extendable()):
            extend(module)
        requests = [r for r in self.recipe.requests if r.name not in CODE]
        self.extensions = [
            QUANTITIES[r.name].extension(r.name, r.options, prepared.truth) for r in requests
        ]
        self.fields = [e.savefield for e in self.extensions]
        self.step: Callable[..., Any] = self._engine

    def capture(self) -> CapturedStep:
        modules = [self.whole, *self.whole.losses.extendable()]
        self.step = captured = capture(self.function, *modules, *self.extensions)
        return captured

    def function(self, *inputs: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            # Targets are drawn as a step draws numbers; notes for other tests are left out.
            patch.setattr(losses, "generator", lambda seed, name: None)
            patch.setattr(Losses, "_divisor", lambda *given: 1.0)
            loss: Tensor = self.whole(*inputs)
        self.whole.losses.divided.clear()
        return loss

    def _engine(self, *inputs: Tensor) -> Tensor:
        loss = self.function(*inputs)  # a net may differentiate parts of itself
        with backpack(*self.extensions):
            loss.backward()
        return loss.detach()

    def run(self, number: int) -> Any:
        """The kind of an error, or all numbers."""
        for parameter in self.whole.parameters():
            parameter.grad = None
            for field in self.fields:
                parameter.__dict__.pop(field, None)
        inputs = fresh(data(self.recipe, number))
        torch.manual_seed(number)
        self.whole.losses.seed = self.recipe.seed
        try:
            loss = self.step(*inputs)
        except BackpackError as error:
            return type(error)
        results = [
            (p.grad, [p.__dict__.get(field) for field in self.fields])
            for p in self.whole.parameters()
        ]
        return loss, results, rng_state()


def differs(ours: Any, right: Any) -> bool:
    if isinstance(ours, type) or isinstance(right, type):
        return ours is not right
    here, there = Apart(ours), Apart(right)
    if here.form != there.form:
        return True
    return any(not _close(a, b) for a, b in zip(here.tensors, there.tensors, strict=True))


def _close(ours: Tensor, right: Tensor) -> bool:
    if ours.shape != right.shape or ours.dtype != right.dtype:
        return False
    if not ours.is_floating_point():
        return torch.equal(ours, right)
    size = float(right.abs().nan_to_num().max()) if right.numel() else 0.0
    return torch.allclose(ours, right, rtol=0.0, atol=1e-13 * size, equal_nan=True)


def move(model: nn.Module) -> None:
    """Change the parameters, as a step of an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None and math.isfinite(float(parameter.grad.sum())):
                parameter -= 0.01 * parameter.grad


def compared(seed: int) -> tuple[str, int]:
    """What is wrong with the captured steps of a net, and how many were replayed."""
    prepared = draw(seed)
    ours, engine = Side(prepared), Side(prepared)
    if not ours.extensions or not isinstance(ours.whole, nn.Module):
        return "", 0
    step = ours.capture()
    for number in range(1, STEPS):
        found, right = ours.run(number), engine.run(number)
        if differs(found, right) or "could not be written" in step.report():
            return f"net {seed}, step {number}: {step.report()}\n{prepared.recipe}", 0
        for side in (ours, engine):
            move(side.whole)
    replays = sum(f.graph.replays for forms in step._forms.values() for f in forms if f.graph)
    for side in (ours, engine):
        for parameter in side.whole.parameters():
            parameter.grad = None
            parameter.__dict__.clear()
    return "", replays


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first = metafunc.config.getoption("--seed")
    count = max(1, metafunc.config.getoption("--nets") // SHARE)
    size = min(LARGEST_BLOCK, -(-count // BLOCKS))
    blocks = [range(s, min(s + size, first + count)) for s in range(first, first + count, size)]
    metafunc.parametrize("seeds", blocks, ids=[f"{b[0]}-{b[-1]}" for b in blocks])


def test_random_nets(seeds: range) -> None:
    faults, replayed, count = list[str](), 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            fault, replays = compared(seed)
            faults += [fault] if fault else []
            replayed, count = replayed + bool(replays), count + 1
    assert not faults, "\n".join(faults[:5])
    assert replayed >= count // 5 or count < 10
