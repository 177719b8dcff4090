"""Gradients of several losses, mixtures of gradients, and how far gradients agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import ShapeError, UsageError
from backpack_core.extensions import (
    AggregatedGrad,
    BatchDotGrad,
    BatchGrad,
    DiagGGNExact,
    TaskDotGrad,
    TaskGrad,
)
from backpack_firstorder.agreement import Agreement, agreement
from tests import oracle
from tests.cases import Net


class Tasks:
    """A body that all losses share, a number, a layer that two share, and a head for each."""

    def __init__(self, merged: bool = False) -> None:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        heads = [nn.Linear(4, k) for k in (2, 3, 1)]
        parts = {f"head{i}": head for i, head in enumerate(heads)}
        self.net = Net(
            self.forward, body=body, scale=nn.Parameter(torch.tensor(0.7)), pair=nn.Linear(4, 4),
            frozen=nn.Linear(4, 4).requires_grad_(False), **parts,
        )  # fmt: skip
        self.x = torch.randn(5, 2, 3) if merged else torch.randn(5, 3)
        rows = (5, 2) if merged else (5,)
        self.merged = merged
        self.targets = torch.randint(2, rows), torch.randint(3, rows), torch.randn(*rows, 1)
        self.losses = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss()

    @staticmethod
    def forward(net: Any, x: Tensor) -> list[Tensor]:
        h = net.frozen(net.body(x) * net.scale)
        paired = net.pair(h)
        return [net.head0(paired), net.head1(h), net.head2(paired + h)]

    def values(self) -> list[Tensor]:
        outputs = zip(self.losses, self.net(self.x), self.targets, strict=True)
        if self.merged:
            return [loss(y.flatten(0, 1), t.flatten(0, 1)) for loss, y, t in outputs]
        return [loss(y, t) for loss, y, t in outputs]

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def expected(self, factors: list[float]) -> list[Tensor]:
        """``[T, *θ]`` of every parameter."""
        rows = [
            torch.autograd.grad(f * v, self.parameters, materialize_grads=True, retain_graph=True)
            for f, v in zip(factors, self.values(), strict=True)
        ]
        return [torch.stack(each) for each in zip(*rows, strict=True)]

    def extended(self) -> Tasks:
        extend(self.net)
        for loss in self.losses:
            extend(loss)
        return self


FACTORS = [1.0, -0.5, 3.0]


def go(tasks: Tasks, *extensions: Any, order: tuple[int, ...] = (0, 1, 2), **options: Any) -> None:
    values = tasks.extended().values()
    with backpack(*extensions, **options):
        torch.stack([FACTORS[k] * values[k] for k in order]).sum().backward()


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_rows_of_losses(merged: bool, order: tuple[int, ...]) -> None:
    tasks = Tasks(merged)
    expected = tasks.expected(FACTORS)
    go(tasks, TaskGrad(), TaskDotGrad(), BatchGrad(), order=order)
    assert not hasattr(tasks.net.frozen.weight, "grad_task")
    for p, rows in zip(tasks.parameters, expected, strict=True):
        oracle.assert_close(p.grad_task, rows)
        oracle.assert_close(p.grad_task.sum(0), p.grad)
        oracle.assert_close(p.grad_batch.sum(0), p.grad)
        flat = rows.reshape(3, -1)
        oracle.assert_close(p.task_dot, flat @ flat.T)


def test_beside_curvature() -> None:
    tasks = Tasks()
    expected = tasks.expected([1.0, 1.0, 1.0])
    values = tasks.extended().values()
    with backpack(TaskGrad(), DiagGGNExact(), gradient="none"):
        sum(values).backward()
    for p, rows in zip(tasks.parameters, expected, strict=True):
        oracle.assert_close(p.grad_task, rows)
        assert p.diag_ggn_exact.shape == p.shape


def test_samples_of_tasks() -> None:
    tasks = Tasks()
    tasks.x, tasks.targets = tasks.x[[3, 0]], tuple(t[[3, 0]] for t in tasks.targets)
    factors = [2 / 5 * FACTORS[0], FACTORS[1], 2 / 5 * FACTORS[2]]  # a mean is over the whole batch
    expected = tasks.expected(factors)
    whole = Tasks()
    go(whole, TaskGrad([3, 0]))
    for p, rows in zip(whole.parameters, expected, strict=True):
        oracle.assert_close(p.grad_task, rows)


def weights_of(gram: Tensor) -> Tensor:
    """A weighting that is not linear."""
    return torch.linalg.solve(gram + 0.1 * torch.eye(len(gram)).to(gram), gram.new_ones(len(gram)))


@pytest.mark.parametrize("merged", [False, True])
def test_mixture_of_losses(merged: bool) -> None:
    tasks = Tasks(merged)
    expected = tasks.expected(FACTORS)
    gram = sum(rows.reshape(3, -1) @ rows.reshape(3, -1).T for rows in expected)
    go(tasks, AggregatedGrad(weights_of))
    for p, rows in zip(tasks.parameters, expected, strict=True):
        oracle.assert_close(p.grad_aggregated, torch.einsum("t,t...->...", weights_of(gram), rows))


def test_mixture_of_samples() -> None:
    tasks = Tasks()
    go(tasks, AggregatedGrad(weights_of, rows="samples"), BatchGrad(), BatchDotGrad())
    gram = agreement(tasks.net).gram
    for p in tasks.parameters:
        expected = torch.einsum("n,n...->...", weights_of(gram), p.grad_batch)
        oracle.assert_close(p.grad_aggregated, expected)


def test_aggregators_of_torchjd() -> None:
    aggregation = pytest.importorskip("torchjd.aggregation", reason="torchjd is not installed")
    for aggregator in (aggregation.MGDA(), aggregation.AlignedMTL()):
        tasks = Tasks()
        rows = tasks.expected([1.0, 1.0, 1.0])
        whole = aggregator(torch.cat([row.reshape(3, -1) for row in rows], 1))
        values = tasks.extended().values()
        with backpack(AggregatedGrad(aggregator), gradient="none"):
            sum(values).backward()
        found = torch.cat([p.grad_aggregated.flatten() for p in tasks.parameters])
        oracle.assert_close(found, whole, 1e-8)
    with pytest.raises(UsageError, match="need the Jacobian"):
        AggregatedGrad(aggregation.TrimmedMean(1))


def test_agreement() -> None:
    torch.manual_seed(0)
    net, lossfunc = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.MSELoss()
    extend(net), extend(lossfunc)
    with backpack(BatchGrad(), BatchDotGrad()):
        lossfunc(net(torch.randn(6, 3)), torch.ones(6, 2)).backward()
    g = torch.cat([p.grad_batch.flatten(1) for p in net.parameters()], 1)
    found, mean = agreement(net), g.mean(0)
    oracle.assert_close(found.norms, g.norm(dim=1))
    oracle.assert_close(found.cosines, torch.cosine_similarity(g[:, None], g[None], dim=2))
    oracle.assert_close(found.cosine_to_mean, torch.cosine_similarity(g, mean[None]))
    noise = g.var(0).sum()
    oracle.assert_close(found.noise_scale, noise / (mean.square().sum() - noise / 6))


def test_noise_scale_has_no_bias() -> None:
    """Numerator and denominator, over many batches of known noise."""
    generator = torch.Generator().manual_seed(0)
    g = torch.tensor([1.0, 2.0]) + torch.randn(20_000, 4, 2, generator=generator)
    grams = g @ g.mT
    noise = (grams.diagonal(dim1=1, dim2=2).sum(1) - 4 * grams.mean((1, 2))) / 3
    assert abs(noise.mean() - 2) < 0.05
    assert abs((grams.mean((1, 2)) - noise / 4).mean() - 5) < 0.05
    assert Agreement(grams[0]).noise_scale == noise[0] / (grams[0].mean() - noise[0] / 4)


def test_agreement_at_its_edges() -> None:
    zero = Agreement(torch.zeros(2, 2))
    assert not zero.cosines.any()
    assert not zero.cosine_to_mean.any()
    assert Agreement(torch.tensor([[1.0, -1.0], [-1.0, 1.0]])).noise_scale == math.inf
    assert Agreement(torch.full((2, 2), math.nan)).noise_scale.isnan()
    with pytest.raises(ShapeError, match="at least two samples"):
        _ = Agreement(torch.ones(1, 1)).noise_scale
    net = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="BatchDotGrad"):
        agreement(net)
    net.weight.batch_dot, net.bias.batch_dot = torch.ones(2, 2), torch.ones(3, 3)
    with pytest.raises(ShapeError, match="another pass"):
        agreement(net)


def test_refusals() -> None:
    for wrong in (3.0, nn.Identity):
        with pytest.raises(UsageError, match="Gram matrix"):
            AggregatedGrad(wrong)
    with pytest.raises(UsageError, match='"samples" or "losses"'):
        AggregatedGrad(weights_of, rows="tasks")
    with pytest.raises(ShapeError, match=r"return 3 weights, one for each row. Got \[2\]"):
        go(Tasks(), AggregatedGrad(lambda gram: torch.ones(2)))
