"""A quantity of some samples is that part of the quantity of all samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import AutodiffFallbackWarning, UsageError
from backpack_core.extensions import BatchGrad, DiagGGNExact, DiagGGNMC, SumGradSquared
from tests import oracle
from tests.cases import Net, classification
from tests.core.functional import OPERATIONS, heads
from tests.loss_cases import LOSSES, LossCase

INDICES = [[0], [3, 1], [2, 0, 1, 3], [-1, 0]]


class Shift(nn.Module):
    """Has no rule, but a child."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.child(x) + self.shift)


class Scaled(nn.Module):
    """Has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale)


def _time_first(x: Tensor) -> Tensor:
    """Intermediate tensors that have the samples on another axis."""
    return (
        x.reshape(-1, 2, 2)
        .transpose(0, 1)
        .sin()
        .reshape(2, -1)
        .reshape(2, -1, 2)
        .mT.reshape(-1, 2 * len(x))
        .reshape(2, 2, -1)
        .permute(2, 0, 1)
        .flatten(1)
    )


def _heads_of_data(net: Any, x: Tensor) -> Tensor:
    """Data meet a table before any layer, and the layer behind computes several heads."""
    h = net.a(x[:, None] + net.table(torch.arange(2)))
    query, value = h.view(len(x), 2, 2, 3).permute(2, 0, 1, 3)
    result: Tensor = net.b((query * value.sin()).mean(1))
    return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(2, 3)
    ),
    "in_place": lambda: nn.Sequential(nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Linear(4, 3)),
    "twice": lambda: Net(lambda net, x: net.a(torch.sin(net.a(x))), a=nn.Linear(3, 3)),
    "residual": lambda: Net(
        lambda net, x: net.b((h := net.a(x)) + torch.tanh(h)), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    ),
    "heads": lambda: Net(
        lambda net, x: net.b(heads(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    ),
    "time_first": lambda: Net(
        lambda net, x: net.b(_time_first(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    ),
    "recurrent_to_the_end": lambda: Net(
        lambda net, x: net.b(net.a(x[..., None]).transpose(0, 1))[0].transpose(0, 1).mean(1),
        a=nn.Linear(1, 2),
        b=nn.GRU(2, 4),
    ),
    "splits": lambda: Net(
        lambda net, x: net.b(OPERATIONS["splits"](net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    ),
    "heads_of_data": lambda: Net(
        _heads_of_data, table=nn.Embedding(2, 3), a=nn.Linear(3, 6), b=nn.Linear(3, 3)
    ),
    "no_rule": lambda: nn.Sequential(nn.Linear(3, 4), Scaled(), nn.Linear(4, 3)),
    "container": lambda: nn.Sequential(nn.Linear(3, 4), Shift(), nn.Linear(4, 3)),
}


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("indices", INDICES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_part_of_the_whole(name: str, indices: list[int]) -> None:
    problem = classification(MODELS[name](), (3,), 4)
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = problem.expected(oracle.ggn_diagonals)
    problem.run(
        BatchGrad(indices),
        SumGradSquared(indices),
        DiagGGNExact(indices),
        BatchGrad(savefield="of_all"),
        DiagGGNExact(savefield="all_diag"),
    )
    problem.compare("grad_batch", [g[indices] for g in gradients])
    problem.compare("sum_grad_squared", [g[indices].square().sum(0) for g in gradients])
    problem.compare("diag_ggn_exact", [d[indices].sum(0) for d in diagonals])
    problem.compare("of_all", gradients)
    problem.compare("all_diag", [d.sum(0) for d in diagonals])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
def test_loss_keeps_the_scale_of_the_whole_batch(case: LossCase, reduction: str) -> None:
    problem = case.problem(4, reduction)
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = problem.expected(oracle.ggn_diagonals)
    problem.run(BatchGrad([2, 0]), DiagGGNExact([2, 0]))
    problem.compare("grad_batch", [g[[2, 0]] for g in gradients])
    problem.compare("diag_ggn_exact", [d[[2, 0]].sum(0) for d in diagonals])


def test_monte_carlo() -> None:
    """The mean of 20 estimates with 500 samples is within 5 standard errors."""
    problem = classification(MODELS["residual"](), (3,), 4)
    exact = torch.cat([d[[1, 2]].sum(0).flatten() for d in problem.expected(oracle.ggn_diagonals)])
    draws = []
    for _ in range(20):
        problem.run(DiagGGNMC(mc_samples=500, subsampling=[1, 2]))
        draws.append(torch.cat([d.flatten() for d in problem.fields("diag_ggn_mc")]))
    estimates = torch.stack(draws)
    assert bool(((estimates.mean(0) - exact).abs() < 5 * estimates.std(0) / 20**0.5).all())


@pytest.mark.parametrize(
    "indices", [(0, 2), range(0, 3, 2), torch.tensor([0, 2]), np.array([0, 2])], ids=type
)
def test_kinds_of_sequences(indices: Sequence[int]) -> None:
    assert BatchGrad(indices).subsampling == (0, 2)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([], "empty"),
        ([0.5], "integers"),
        ("12", "integers"),
        (3, "integers"),
        ([[0, 1]], "integers"),
        ([True, False], "mask"),
        (torch.tensor([True, False]), "mask"),
    ],
    ids=str,
)
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, DiagGGNMC])
def test_no_indices(extension: Any, indices: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        extension(subsampling=indices)


@pytest.mark.parametrize("indices", [[3], [0, 7], [-4]], ids=str)
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_index_outside_of_the_batch(extension: Any, indices: list[int]) -> None:
    problem = classification(MODELS["mlp"](), (3,), 3)
    with pytest.raises(UsageError, match=rf"asks for sample {indices[-1]}.*batch of 3.*0 to 2"):
        problem.run(extension(indices))


@pytest.mark.parametrize("indices", [[2], [0, 3], [-3]], ids=str)
@pytest.mark.parametrize("lossfunc", [nn.functional.cross_entropy, extend(nn.CrossEntropyLoss())])
def test_index_outside_of_the_samples_that_were_told(lossfunc: Any, indices: list[int]) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)))
    loss = lossfunc(model(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0]))
    words = rf"asks for sample {indices[-1]}.*batch of 2.*0 to 1"
    with pytest.raises(UsageError, match=words), backpack(BatchGrad(indices), samples=[0, 1, 1, 0]):
        loss.backward()


def test_no_rule_warns_once() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 4), Scaled(), nn.Linear(4, 3)), (3,), 4)
    with pytest.warns(AutodiffFallbackWarning) as caught:
        problem.run(BatchGrad([0]), SumGradSquared([1]))
    assert len(caught) == 1


class _WithOffset(nn.Module):
    """A layer that is called twice, beside a parameter that a function uses."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.offset = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.child(torch.sin(self.child(x)) + self.offset)
        return result


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("change", [torch.relu_, lambda out: out.add_(0.3)])
def test_of_outputs_that_are_changed_in_place(change: Any, shape: tuple[int, ...]) -> None:
    """What a layer returned is then a view of a tensor that has no samples in front."""
    model, x = _WithOffset(), torch.randn(4, *shape)
    expected = [
        torch.autograd.grad(change(model(x[n : n + 1])).square().sum(), list(model.parameters()))
        for n in (2, 0)
    ]
    extend(model)
    with backpack(BatchGrad(subsampling=[2, 0]), SumGradSquared(subsampling=[2, 0])):
        change(model(x)).square().sum().backward()
    for p, *own in zip(model.parameters(), *expected, strict=True):
        gradients = torch.stack(own)
        torch.testing.assert_close(p.grad_batch, gradients)  # type: ignore[attr-defined]
        squares = gradients.square().sum(0)
        torch.testing.assert_close(p.sum_grad_squared, squares)  # type: ignore[attr-defined]


def test_of_an_output_beside_one_without_samples() -> None:
    mean, spread, table = (
        nn.Linear(3, 2),
        nn.Parameter(torch.randn(2)),
        nn.Parameter(torch.randn(2)),
    )
    model = Net(lambda net, x: net.actor(x)[0].add_(0.3) + net.table, actor=_Actor(mean, spread))
    model.table = table
    x = torch.randn(3, 3)
    expected = torch.autograd.grad(model(x[1:2]).square().sum(), mean.weight)[0]
    extend(model)
    with backpack(BatchGrad(subsampling=[1])):
        model(x).square().sum().backward()
    torch.testing.assert_close(mean.weight.grad_batch[0], expected)  # type: ignore[index]
    assert len(mean.weight.grad_batch) == 1  # type: ignore[arg-type]


class _Actor(nn.Module):
    """A mean, and a spread that does not depend on the input."""

    def __init__(self, mean: nn.Linear, spread: nn.Parameter) -> None:
        super().__init__()
        self.mean, self.spread = mean, spread

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(x)
        return mean, self.spread.expand_as(mean)
