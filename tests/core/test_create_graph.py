"""Quantities that are differentiated themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, disable
from backpack_core.extensions import BatchGrad, DiagGGNExact, SumGradSquared
from tests import oracle
from tests.cases import Net, Problem, classification, mlp


class Scaled(nn.Module):
    """Returns its input as well as what it computes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.sin(x * self.weight)


class Both(nn.Module):
    """The product of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.pair(x)
        result: Tensor = first * second
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tanh": mlp,
    "sigmoid": lambda: nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3)),
    "softmax": lambda: nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 3)),
    "in_place": lambda: nn.Sequential(nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Linear(4, 3)),
    "elu_in_place": lambda: nn.Sequential(nn.Linear(3, 4), nn.ELU(inplace=True), nn.Linear(4, 3)),
    "function": lambda: Net(
        lambda net, x: net.b(torch.sin(net.a(x)) * net.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)
    ),
    "view_of_the_input": lambda: nn.Sequential(nn.Linear(3, 4), Both(), nn.Linear(4, 3)),
    "last": lambda: nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()),
}


FIELDS = ("grad_batch", "sum_grad_squared", "diag_ggn_exact")


def quantities(model: nn.Module, values: tuple[Tensor, ...], problem: Problem) -> dict[str, Any]:
    """All three quantities by torch.func, for every parameter, as functions of the parameters."""
    (x,), y = problem.inputs, problem.target
    names = [name for name, _ in model.named_parameters()]

    def output(parameters: tuple[Tensor, ...], n: int) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        result: Tensor = torch.func.functional_call(model, named, x[n : n + 1])
        return result[0]

    def loss(parameters: tuple[Tensor, ...], n: int) -> Tensor:
        return F.cross_entropy(output(parameters, n)[None], y[n : n + 1]) / len(x)

    def diagonals(n: int) -> list[Tensor]:
        probabilities = output(values, n).softmax(0)
        hessian = (probabilities.diag() - probabilities.outer(probabilities)) / len(x)
        jacobians = torch.func.jacrev(output)(values, n)
        return [torch.einsum("c...,cd,d...->...", j, hessian, j) for j in jacobians]

    samples = range(len(x))
    gradients = [
        torch.stack(g)
        for g in zip(*(torch.func.grad(loss)(values, n) for n in samples), strict=True)
    ]
    return {
        "grad_batch": gradients,
        "sum_grad_squared": [g.square().sum(0) for g in gradients],
        "diag_ggn_exact": [sum(d) for d in zip(*map(diagonals, samples), strict=True)],
    }


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("field", FIELDS)
def test_quantities_can_be_differentiated(name: str, field: str) -> None:
    """With create_graph=True; the gradient of a random projection, against that of the oracle."""
    problem = classification(MODELS[name](), (3,))
    values = tuple(p.detach().requires_grad_() for p in problem.parameters)
    with disable():
        reference = quantities(problem.model, values, problem)[field]
    weights = [torch.randn_like(q) for q in reference]

    def project(found: list[Tensor]) -> Tensor:
        return torch.stack([(w * q).sum() for w, q in zip(weights, found, strict=True)]).sum()

    expected = torch.autograd.grad(project(reference), values)
    loss = problem.loss()
    with backpack(BatchGrad(), SumGradSquared(), DiagGGNExact()):
        gradients = torch.autograd.grad(loss, problem.parameters, create_graph=True)
    found = torch.autograd.grad(
        project(problem.fields(field)), problem.parameters, retain_graph=True
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0
        oracle.assert_close(ours, theirs)
    # The graph survives: the gradient itself can still be differentiated.
    torch.autograd.grad(sum(g.sum() for g in gradients), problem.parameters)
    for parameter in problem.parameters:
        for attribute in FIELDS:
            delattr(parameter, attribute)
