"""KFRA: averages that go backwards by a recursion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core.errors import BridgeError, UnsupportedError
from backpack_core.extensions import KFRA
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.secondorder.factors import covariance, inputs_of, layers
from tests.secondorder.problems import CHAINS, SETTINGS, make


def test_averages_of_several_uses_have_no_sum() -> None:
    net = Net(lambda net, x: net.a(net.t(net.a(x))), a=nn.Linear(3, 3), t=nn.Tanh())
    with pytest.raises(UnsupportedError, match=r"used 2 times, and AverageReading has no meaning"):
        classification(net, (3,)).run(KFRA())


def recursion(modules: Sequence[nn.Module], problem: Problem) -> dict[nn.Module, Tensor]:
    """``Ḡ`` at the output of every module, by explicit Jacobians of every sample."""
    tensors = [problem.inputs[0]]
    for module in modules:
        tensors.append(module(tensors[-1]).detach())
    blocks = oracle.loss_hessians(lambda out: problem.lossfunc(out, problem.target), tensors[-1])
    average = blocks.sum(0)
    found = {}
    for module, x in zip(reversed(modules), reversed(tensors[:-1]), strict=True):
        found[module] = average
        jacobians = [
            torch.autograd.functional.jacobian(
                lambda v, m=module, s=sample.shape: m(v.reshape(1, *s)).flatten(), sample.flatten()
            )
            for sample in x
        ]
        average = sum(j.T @ average @ j for j in jacobians) / len(x)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(("batch", "reduction", "loss"), SETTINGS[1:])
@pytest.mark.parametrize("net", CHAINS)
def test_kfra(net: str, batch: int, reduction: str, loss: str) -> None:
    problem = make(net, batch, reduction, loss)
    modules = [m if not getattr(m, "inplace", False) else nn.ReLU() for m in problem.model]  # type: ignore[attr-defined]
    averages = recursion(modules, problem)
    received = inputs_of(problem)
    problem.run(KFRA(), KFRA("expand", savefield="expanded"))
    for layer in layers(problem):
        features = len(layer.bias)
        average = averages[layer]
        if isinstance(layer, nn.Linear):
            positions = len(average) // features
            split = average.reshape(positions, features, positions, features).permute(1, 3, 0, 2)
        else:
            pixels = len(average) // features
            split = average.reshape(features, pixels, features, pixels).transpose(1, 2)
        outer, inner = layer.weight.kfra
        oracle.assert_close(outer, split.sum((2, 3)))
        oracle.assert_close(inner, covariance(layer, received[layer]))
        oracle.assert_close(layer.bias.kfra[0], outer)
        expanded = split.diagonal(dim1=2, dim2=3).sum(-1)
        oracle.assert_close(layer.weight.expanded[0], expanded)


def test_kfra_goes_through_functional_operations() -> None:
    parts = {"conv": nn.Conv2d(1, 2, 2), "last": nn.Linear(8, 3)}
    net = Net(lambda net, x: net.last(F.silu(net.conv(x)).flatten(1)), **parts)
    problem = classification(net, (1, 3, 3))
    problem.run(KFRA(), KFRA(subsampling=[0, 1], savefield="some"))
    ours = [list(p.kfra) + list(p.some) for p in problem.parameters]
    problem.model = nn.Sequential(parts["conv"], nn.SiLU(), nn.Flatten(), parts["last"])
    problem.run(KFRA(), KFRA(subsampling=[0, 1], savefield="some"))
    for p, factors in zip(problem.parameters, ours, strict=True):
        for factor, other in zip(factors, list(p.kfra) + list(p.some), strict=True):
            oracle.assert_close(factor, other)


class Parts(nn.Module):
    """One loss for each part of an output."""

    def __init__(self, split: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.split, self.first, self.second = split, nn.MSELoss(), nn.CrossEntropyLoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        first, second = self.split(output)
        result: Tensor = self.first(first, torch.zeros_like(first)) + self.second(second, target)
        return result


@pytest.mark.parametrize(
    "split",
    [lambda out: (out[:, :3], out[:, 3:]), lambda out: out.chunk(2, 1), lambda out: (out, out)],
    ids=["slices", "chunks", "whole"],
)
def test_averages_of_several_losses_are_added(split: Callable[[Tensor], Sequence[Tensor]]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6))
    problem = Problem(model, (torch.randn(5, 3),), Parts(split), torch.randint(0, 3, (5,)))
    averages = recursion([*model], problem)
    problem.run(KFRA())
    for layer in layers(problem):
        oracle.assert_close(layer.weight.kfra[0], averages[layer])


def test_kfra_refuses_branches() -> None:
    with pytest.raises(UnsupportedError, match="the net must be a chain"):
        make("residual").run(KFRA())
    merged = Net(
        lambda net, x: net.a(x).flatten(0, 1).unflatten(0, (3, 2)).flatten(1), a=nn.Linear(2, 2)
    )
    problem = classification(merged, (2, 2), classes=4)
    with pytest.raises(BridgeError, match="samples on axis 0"):
        problem.run(KFRA())
