"""Home-made checkpoints: a backward formula runs a pass, and fills ``grad`` of what is inside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, disable, extend, unextend
from backpack_core.errors import BackpackError
from backpack_core.extensions import KFAC, BatchGrad, DiagGGNExact, DiagGGNMC, SumGradSquared
from tests import oracle
from tests.cases import Problem, classification

pytestmark = [
    pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning"),
    pytest.mark.filterwarnings("ignore::backpack_core.errors.UncoveredParameterWarning"),
]


class HomemadeCheckpoint(torch.autograd.Function):
    """The function first."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, begin: Any = Tensor.backward) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        begin(output, grad)
        return None, x.grad


class HomemadeCheckpointOfTensor(HomemadeCheckpoint):
    """The tensor first; the pass is begun as torch's own checkpoints begin theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return HomemadeCheckpoint.forward(ctx, function, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return HomemadeCheckpoint.backward(ctx, grad, torch.autograd.backward)[::-1]


class Checkpointed(nn.Module):
    """Two layers, and two modules under a checkpoint between them."""

    def __init__(self, inside: str, order: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.inside, self.order, self.is_plain = inside, order, False

    def run(self, x: Tensor) -> Tensor:
        """What is computed twice."""
        if self.inside == "functions":
            linear: Any = self.inner[0]
            return F.linear(x, linear.weight, linear.bias).tanh()
        with disable() if self.inside == "disabled" else nullcontext():
            result: Tensor = self.inner(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.is_plain:
            hidden = self.run(hidden)
        elif self.order == "function_first":
            hidden = HomemadeCheckpoint.apply(self.run, hidden)
        else:
            hidden = HomemadeCheckpointOfTensor.apply(hidden, self.run)
        result: Tensor = self.last(hidden)
        return result


def checkpointed(inside: str, order: str) -> tuple[Problem, list[Tensor]]:
    """The problem, extended, and individual gradients."""
    model = Checkpointed(inside, order)
    problem = classification(model, (3,))
    model.is_plain = True
    gradients = problem.expected(oracle.individual_gradients)
    model.is_plain = False
    extend(model), extend(problem.lossfunc)
    if inside == "not_extended":
        unextend(model.inner)
    return problem, gradients


INSIDE = pytest.mark.parametrize("inside", ["modules", "not_extended", "functions", "disabled"])


ORDER = pytest.mark.parametrize("order", ["function_first", "tensor_first"])


@INSIDE
@ORDER
def test_gradients_through_a_homemade_checkpoint(inside: str, order: str) -> None:
    """Of the layers outside in any case, and of those inside where they are computed."""
    problem, gradients = checkpointed(inside, order)
    loss = problem.lossfunc(problem.model(*problem.inputs), problem.target)
    with backpack(BatchGrad(), SumGradSquared()):
        loss.backward()
    problem.compare("grad", [g.sum(0) for g in gradients])
    for (name, p), values in zip(problem.model.named_parameters(), gradients, strict=True):
        if not name.startswith("inner") or hasattr(p, "grad_batch"):
            oracle.assert_close(p.grad_batch, values)
            oracle.assert_close(p.sum_grad_squared, values.square().sum(0))


CURVATURE: dict[str, Callable[[], Any]] = {
    "exact": DiagGGNExact,
    "columns": lambda: DiagGGNExact(chunk_size=1),
    "sampled": DiagGGNMC,
    "factors": KFAC,
}


@INSIDE
@ORDER
@pytest.mark.parametrize("extension", CURVATURE)
def test_curvature_through_a_homemade_checkpoint(inside: str, order: str, extension: str) -> None:
    """The error names the function, and ``grad`` holds nothing that is wrong."""
    problem, gradients = checkpointed(inside, order)
    loss = problem.lossfunc(problem.model(*problem.inputs), problem.target)
    with (
        pytest.raises(BackpackError, match="HomemadeCheckpoint"),
        backpack(CURVATURE[extension]()),
    ):
        loss.backward()
    for p, values in zip(problem.parameters, gradients, strict=True):
        if p.grad is not None:
            oracle.assert_close(p.grad, values.sum(0))
