"""A captured step and the engine, side by side on equal nets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backpack_capture import CapturedStep, capture
from backpack_capture.nested import Apart
from backpack_core import Extension, backpack, extend
from tests.devices import rng_state

Function = Callable[..., Any]


def of_loss(model: nn.Module, lossfunc: nn.Module) -> Function:
    """The usual step."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        return lossfunc(model(x), y)

    return step


class Twins:
    """Two equal nets, one of them captured."""

    def __init__(
        self,
        model: nn.Module,
        extensions: Sequence[Extension],
        write: Callable[[nn.Module, nn.Module], Function] = of_loss,
        lossfunc: nn.Module | None = None,
        gradient: Any = "autograd",
    ) -> None:
        lossfunc = lossfunc or nn.CrossEntropyLoss()
        self.model, self.lossfunc = extend(copy.deepcopy(model)), extend(copy.deepcopy(lossfunc))
        self.other, self.other_loss = extend(model), extend(lossfunc)
        self.extensions, self.gradient = tuple(extensions), gradient
        self.function = write(self.other, self.other_loss)
        self.step: CapturedStep = capture(
            write(self.model, self.lossfunc),
            *(self.model, self.lossfunc, *copy.deepcopy(self.extensions)),
            gradient=gradient,
        )
        self._seed = 0

    def engine(self, *args: Any, **kwargs: Any) -> Any:
        with backpack(*self.extensions, gradient=self.gradient):
            found = self.function(*args, **kwargs)
            (found[0] if isinstance(found, tuple) else found).backward()
        return found

    def run(self, *args: Any, keeps: bool = False) -> None:
        """One step of both; everything must be equal, bit by bit."""
        if not keeps:
            for parameter in (*self.model.parameters(), *self.other.parameters()):
                parameter.grad = None
        self._seed += 1
        torch.manual_seed(self._seed)
        right = self.engine(*args)
        state = rng_state()
        torch.manual_seed(self._seed)
        ours = self.step(*args)
        assert torch.equal(rng_state(), state)
        same(ours, right)
        self.compare()

    def compare(self) -> None:
        """Gradients, buffers, and results."""
        fields = [e.savefield for e in self.extensions]
        pairs = zip(self.model.named_parameters(), self.other.parameters(), strict=True)
        for (name, ours), right in pairs:
            same(ours.grad, right.grad)
            for field in fields:
                assert (field in ours.__dict__) == (field in right.__dict__), (name, field)
                same(ours.__dict__.get(field), right.__dict__.get(field))
        for ours, right in zip(self.model.buffers(), self.other.buffers(), strict=True):
            same(ours, right)

    def update(self, rate: float = 0.1) -> None:
        """What an optimiser does."""
        for model in (self.model, self.other):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= rate * parameter.grad

    def train(self, batches: Sequence[Any], keeps: bool = False) -> None:
        for batch in batches:
            self.run(*batch, keeps=keeps)
            self.update()

    @property
    def replays(self) -> int:
        """How many steps were replayed."""
        graphs = [f.graph for forms in self.step._forms.values() for f in forms if f.graph]
        return sum(graph.replays - graph.reruns for graph in graphs)


def same(ours: Any, right: Any) -> None:
    """Equal, nested values with tensors too; without a graph."""
    here, there = Apart(ours), Apart(right)
    assert here.form == there.form
    for one, other in zip(here.tensors, there.tensors, strict=True):
        assert not one.requires_grad
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
