"""A model and its plain copy, with gradients to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import (
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    SumGradSquared,
    Variance,
)
from backpack_interplay import gradient as module_of_gradients
from tests import oracle
from tests.cases import Net

PASSES = 5  # the first, and 1, 2, 4, … after it, are judged by autograd's gradient


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 3)
    )


def token_net() -> nn.Module:
    return Net(
        lambda net, x: net.c(net.norm(net.a(x) + net.b(torch.tanh(net.a(x)))).mean(1)),
        a=nn.Linear(2, 4),
        b=nn.Linear(4, 4),
        norm=nn.LayerNorm(4),
        c=nn.Linear(4, 3),
    )


class Step:
    """Passes of a model and its plain copy, side by side."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], samples: int = 4) -> None:
        self.plain = model
        self.extended = extend(copy.deepcopy(model))
        self.lossfunc = extend(nn.CrossEntropyLoss())
        self.shape, self.samples = shape, samples
        self.left: list[int] = []  # how many parameters autograd left out, pass by pass

    def data(self) -> tuple[Tensor, Tensor]:
        return torch.randn(self.samples, *self.shape), torch.randint(0, 3, (self.samples,))

    def run(self, *extensions: Any, mode: Any = "shared", **options: Any) -> None:
        """One pass of both."""
        x, y = self.data()
        nn.CrossEntropyLoss()(self.plain(x), y).backward(**options)
        loss = self.lossfunc(self.extended(x), y)
        with self.watching(), backpack(*extensions, gradient=mode):
            loss.backward(**options)

    @contextmanager
    def watching(self) -> Iterator[None]:
        inputs_without = module_of_gradients.inputs_without
        found: list[int] = []

        def watched(left: Any, *args: Any) -> Any:
            found.append(len(left))
            return inputs_without(left, *args)

        module_of_gradients.inputs_without = watched
        try:
            yield
        finally:
            module_of_gradients.inputs_without = inputs_without
            self.left.append(sum(found))

    def compare(self) -> None:
        for ours, theirs in zip(self.extended.parameters(), self.plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None and theirs.grad is not None:
                oracle.assert_close(ours.grad, theirs.grad)
                assert not ours.grad.requires_grad

    def check(self, *extensions: Any, **options: Any) -> None:
        """Several passes, each with gradients of its own; some are shared."""
        for _ in range(PASSES):
            self.plain.zero_grad()
            self.extended.zero_grad()
            self.run(*extensions, **options)
            self.compare()


QUANTITIES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "individual": lambda: (BatchGrad(),),
    "moment": lambda: (SumGradSquared(),),
    "variance": lambda: (Variance(),),
    "four": lambda: (BatchGrad(), Variance(), SumGradSquared(), BatchL2Grad()),
    "with curvature": lambda: (BatchGrad(), DiagGGNExact()),
    "clipped": lambda: (ClippedSumGrad(1.0), BatchGrad()),
    "norms": lambda: (BatchL2Grad(),),
    "norms and moments": lambda: (BatchL2Grad(), SumGradSquared()),
    "clipped alone": lambda: (ClippedSumGrad(1.0),),
}
