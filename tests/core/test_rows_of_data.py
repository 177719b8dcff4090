"""A model that runs on some rows of the data at a time: the rows tell which samples these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import BackpackError, ShapeError
from backpack_core.extensions import (
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagHessian,
    SumGradSquared,
    Variance,
)

N, D, C = 4, 3, 2
Y = torch.tensor([0, 1, 1, 0])
Loss = Callable[[Any, Any, Tensor], Tensor]  # of model, loss function and data


def _one_by_one(model: Any, lossfunc: Any, x: Tensor) -> Tensor:
    losses = [lossfunc(model(x[n : n + 1]), Y[n : n + 1]) for n in range(N)]
    return torch.stack(losses).sum()


def _parts(model: Any, lossfunc: Any, x: Tensor) -> Tensor:
    pairs = zip(x.split(2), Y.split(2), strict=True)
    return sum((lossfunc(model(some), y) for some, y in pairs), torch.zeros(()))


def _functional(model: Any, _: Any, x: Tensor) -> Tensor:
    total = F.cross_entropy(model(x[:2]), Y[:2], reduction="sum")
    return total + F.cross_entropy(model(x[2:]), Y[2:], reduction="sum")


def _added(model: Any, _: Any, x: Tensor) -> Tensor:
    rows = zip(x.split(1), Y.split(1), strict=True)
    losses = (F.cross_entropy(model(row), y, reduction="none") for row, y in rows)
    return sum(losses, torch.zeros(1)).sum()  # of shape [1] each


LOSSES: dict[str, Loss] = {
    "joined": lambda m, f, x: f(torch.cat([m(x[:2]), m(x[2:])]), Y),
    "stacked": lambda m, f, x: f(torch.stack([m(x[:2]), m(x[2:])]).flatten(0, 1), Y),
    "joined, one by one": lambda m, f, x: f(torch.cat([m(x[n : n + 1]) for n in range(N)]), Y),
    "two losses": lambda m, f, x: f(m(x[:2]), Y[:2]) + f(m(x[2:]), Y[2:]),
    "unequal": lambda m, f, x: f(m(x[:3]), Y[:3]) + f(m(x[3:]), Y[3:]),
    "the other way round": lambda m, f, x: f(m(x[2:]), Y[2:]) + f(m(x[:2]), Y[:2]),
    "every other": lambda m, f, x: f(m(x[::2]), Y[::2]) + f(m(x[1::2]), Y[1::2]),
    "of more data": lambda m, f, x: f(m(x[2:3]), Y[2:3]) + f(m(x[:2]), Y[:2]) + f(m(x[3:]), Y[3:]),
    "computed before": lambda m, f, x: f(m(x[:2]), Y[:2]) + f(m(x.detach()[2:]), Y[2:]),
    "one by one": _one_by_one,
    "split": _parts,
    "functional loss": _functional,
    "functional losses of shape [1], added": _added,
}
FUNCTIONAL = {name for name in LOSSES if name.startswith("functional")}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)).double()


class _Scaled(nn.Module):
    """Computes something of the data before the first layer, and has a table as long as a part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = _model(), nn.Embedding(2, D).double()

    def forward(self, x: Tensor) -> Tensor:
        """Of two halves of each sample."""
        both = (x / 2).unsqueeze(1) + self.table(torch.arange(2))
        return self.inner(both).sum(1)


def _expected(model: nn.Module, x: Tensor) -> list[Tensor]:
    rows = []
    for n in range(N):
        loss = F.cross_entropy(model(x[n : n + 1]), Y[n : n + 1], reduction="sum")
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("is_leaf", [False, True], ids=["data", "leaf"])
@pytest.mark.parametrize("name", LOSSES)
def test_first_order(name: str, is_leaf: bool) -> None:
    model, lossfunc = _model(), nn.CrossEntropyLoss(reduction="sum")
    x = torch.randn(N, D).double().requires_grad_(is_leaf)
    expected = _expected(model, x)
    extend(model), extend(lossfunc)
    for _ in range(2):
        with backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance()):
            LOSSES[name](model, lossfunc, x).backward()
        for p, rows in zip(model.parameters(), expected, strict=True):
            own: Any = p
            torch.testing.assert_close(own.grad_batch, rows)
            torch.testing.assert_close(own.batch_l2, rows.flatten(1).square().sum(1))
            torch.testing.assert_close(own.sum_grad_squared, rows.square().sum(0))
            torch.testing.assert_close(own.variance, rows.var(0, unbiased=False))


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in FUNCTIONAL])
def test_curvature_of_single_samples(name: str) -> None:
    model, lossfunc, x = _model(), nn.CrossEntropyLoss(reduction="sum"), torch.randn(N, D).double()
    extend(model), extend(lossfunc)
    with backpack(BatchDiagGGNExact()):
        lossfunc(model(x), Y).backward()
    expected = [p.diag_ggn_exact_batch for p in model.parameters()]  # type: ignore[attr-defined]
    with backpack(BatchDiagGGNExact()):
        LOSSES[name](model, lossfunc, x).backward()
    for p, rows in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact_batch, rows)  # type: ignore[attr-defined]


@pytest.mark.parametrize("weight_sharing", ["kfc", "expand", "reduce"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in FUNCTIONAL])
def test_kronecker_factors(name: str, weight_sharing: Any) -> None:
    model, lossfunc, x = _model(), nn.CrossEntropyLoss(reduction="sum"), torch.randn(N, D).double()
    extend(model), extend(lossfunc)
    with backpack(KFLR(weight_sharing)):
        lossfunc(model(x), Y).backward()
    expected = [p.kflr for p in model.parameters()]  # type: ignore[attr-defined]
    with backpack(KFLR(weight_sharing)):
        LOSSES[name](model, lossfunc, x).backward()
    for p, factors in zip(model.parameters(), expected, strict=True):
        for found, factor in zip(p.kflr, factors, strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(found, factor)


@pytest.mark.parametrize("weight_sharing", ["kfc", "expand", "reduce"])
def test_tables(weight_sharing: Any) -> None:
    table, head = nn.Embedding(6, D).double(), nn.Linear(D, C).double()
    model = nn.Sequential(table, head)
    lossfunc, x = nn.CrossEntropyLoss(reduction="sum"), torch.randint(6, (N, 3))
    y = torch.randint(C, (N, 3))
    extend(model), extend(lossfunc)
    with backpack(KFLR(weight_sharing), BatchGrad()):
        lossfunc(model(x).transpose(1, 2), y).backward()
    expected = [[p.grad_batch, *p.kflr] for p in model.parameters()]  # type: ignore[attr-defined]
    with backpack(KFLR(weight_sharing), BatchGrad()):
        parts = [lossfunc(model(x[i]).transpose(1, 2), y[i]) for i in (slice(1, 4), slice(0, 1))]
        (parts[0] + parts[1]).backward()
    for p, values in zip(model.parameters(), expected, strict=True):
        found = [p.grad_batch, *p.kflr]  # type: ignore[attr-defined]
        for ours, value in zip(found, values, strict=True):
            torch.testing.assert_close(ours, value)


def test_sums_over_samples_need_no_rows() -> None:
    """The Hessian's diagonal is refused where rows of some samples are told apart."""
    model, lossfunc, x = _model(), nn.CrossEntropyLoss(reduction="sum"), torch.randn(N, D).double()
    extend(model), extend(lossfunc)
    with backpack(DiagHessian()):
        lossfunc(model(x), Y).backward()
    expected = [p.diag_h.clone() for p in model.parameters()]  # type: ignore[attr-defined]
    with backpack(DiagHessian()):
        LOSSES["split"](model, lossfunc, x).backward()
    for p, diagonal in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.diag_h, diagonal)  # type: ignore[attr-defined]


def test_operations_before_the_first_layer() -> None:
    model, lossfunc, x = _Scaled(), nn.CrossEntropyLoss(reduction="sum"), torch.randn(N, D).double()
    expected = _expected(model, x)
    extend(model), extend(lossfunc)
    with backpack(BatchGrad()):
        LOSSES["joined"](model, lossfunc, x).backward()
    for p, rows in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, rows)  # type: ignore[attr-defined]
    for refused in ("two losses", "one by one"):  # no call got rows of the data as they are
        with pytest.raises(ShapeError, match="the model received 4 samples"), backpack(BatchGrad()):
            LOSSES[refused](model, lossfunc, x).backward()


def test_steps_that_look_like_samples() -> None:
    """Copies say that row ``n`` of each part belongs to sample ``n``."""
    cell, lossfunc, x = nn.RNNCell(D, C).double(), nn.CrossEntropyLoss(), torch.randn(N, D).double()
    extend(cell), extend(lossfunc)

    def loss(steps: list[Tensor]) -> Tensor:
        h = None
        for step in steps:
            h = cell(step, h)
        result: Tensor = lossfunc(h, Y[:1])
        return result

    steps = [x[t : t + 1] for t in range(N)]
    with pytest.raises(BackpackError, match=r"\(\.clone\(\)\)"), backpack(BatchGrad()):
        loss(steps).backward()
    with backpack(BatchGrad()):
        loss([step.clone() for step in steps]).backward()
    for p in cell.parameters():
        torch.testing.assert_close(p.grad_batch[0], p.grad)  # type: ignore[attr-defined]


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_steps_of_a_sequence_are_no_samples(axis: int, samples: int) -> None:
    cell, head = nn.RNNCell(D, 5).double(), nn.Linear(5, C).double()
    x, y = torch.randn(samples, 3, D).double(), Y[:samples]
    if axis == 0:
        x = x.transpose(0, 1).contiguous()
    net = nn.ModuleList([cell, head])

    def output(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1 - axis], 5)
        for step in x.unbind(axis):
            h = cell(step, h)
        result: Tensor = head(h)
        return result

    rows = []
    for n in range(samples):
        loss = F.cross_entropy(output(x.narrow(1 - axis, n, 1)), y[n : n + 1], reduction="sum")
        rows.append(torch.autograd.grad(loss, list(net.parameters())))
    extend(net)
    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack(BatchGrad()):
        lossfunc(output(x), y).backward()
    for p, *own in zip(net.parameters(), *rows, strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(own))  # type: ignore[attr-defined]


class _TimeFirst(nn.Module):
    """Runs one layer on a sequence with time in front, and on what belongs to no step."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = nn.Linear(D, 5), nn.Linear(5, C)

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        result: Tensor = self.head(
            torch.tanh(self.each(x.transpose(0, 1)).sum(0) + self.each(start))
        )
        return result


@pytest.mark.parametrize("samples", [1, 2])
def test_time_in_front_and_one_entry_for_each_sample(samples: int) -> None:
    model = _TimeFirst().double()
    x, start = torch.randn(samples, 3, D).double(), torch.randn(samples, D).double()
    rows = []
    for n in range(samples):
        loss = model(x[n : n + 1], start[n : n + 1]).square().sum()
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    with backpack(BatchGrad()):
        extend(model)(x, start).square().sum().backward()
    for p, *own in zip(model.parameters(), *rows, strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(own))


@pytest.mark.parametrize("are_copies", [False, True])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_parts_that_are_one_sample_each_are_refused(first: int, are_copies: bool) -> None:
    """As the nodes of each graph, where the loss has an entry for each part."""
    model, lossfunc, x = _model(), nn.CrossEntropyLoss(), torch.randn(N, D).double()
    extend(model), extend(lossfunc)
    parts = [part.clone() if are_copies else part for part in (x[:first], x[first:])]
    out = [model(part).mean(0, keepdim=True) for part in parts]
    joined, single = lossfunc(torch.cat(out), Y[:2]), sum(lossfunc(z, Y[:1]) for z in out)
    for loss in (joined, single):
        with pytest.raises(BackpackError, match="sample"), backpack(BatchGrad()):
            loss.backward(retain_graph=True)


@pytest.mark.parametrize("samples", [1, 2])
def test_steps_of_a_view_of_flat_data_are_no_samples(samples: int) -> None:
    model, x = _model(), torch.randn(3 * samples * D).double().view(3, samples, D)
    extend(model)
    with backpack(BatchGrad()):
        sum((model(step).square().sum() for step in x), torch.zeros(())).backward()
    for p in model.parameters():
        assert len(p.grad_batch) == samples  # type: ignore[attr-defined]
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)  # type: ignore[attr-defined]


def test_tensors_of_their_own_are_views_of_the_same_samples() -> None:
    model, lossfunc = _model(), nn.CrossEntropyLoss(reduction="sum")
    first, second = torch.randn(2, N, D).double().unbind()
    expected = [
        a + b for a, b in zip(_expected(model, first), _expected(model, second), strict=True)
    ]
    extend(model), extend(lossfunc)
    with backpack(BatchGrad()):
        (lossfunc(model(first), Y) + lossfunc(model(second), Y)).backward()
    for p, rows in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch, rows)  # type: ignore[attr-defined]


class _InOrder(nn.Module):
    """Puts its data into another order, before any layer."""

    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.order = _model(), order

    def forward(self, x: Tensor) -> Tensor:
        """In that order."""
        result: Tensor = self.inner(self.order(x))
        return result


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.flip(0),
    "sorted": lambda x: x[x[:, 0].argsort()],
}


@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("order", ORDERS)
def test_all_data_in_another_order(order: str, check: Any) -> None:
    x = torch.tensor([[3.0], [1.0], [2.0], [0.0]]).double() + torch.rand(1, D).double()
    model = extend(_InOrder(ORDERS[order]))
    with pytest.raises(BackpackError, match="in another order"), backpack(BatchGrad(), check=check):
        model(x).square().sum().backward()
    with backpack(SumGradSquared(), check=check):  # of which the order is no part
        model(x).square().sum().backward()
    rows = _expected_of(model.inner, x)
    for p, own in zip(model.parameters(), zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(p.sum_grad_squared, torch.stack(own).square().sum(0))  # type: ignore[attr-defined]


def _expected_of(model: nn.Module, x: Tensor) -> list[tuple[Tensor, ...]]:
    losses = [model(x[n : n + 1]).square().sum() for n in range(len(x))]
    return [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]


def test_negatives_beside_positives() -> None:
    # Of each row, the loss of a sample and a negative: by the order of the positives.
    x, order = torch.randn(N, D).double(), torch.tensor([2, 0, 3, 1])
    parts = nn.ModuleDict({"positive": _model(), "negative": _model()})

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor) -> Tensor:
            return (self.parts["positive"](x) * self.parts["negative"](x[order])).sum(1)

    losses = [
        (parts["positive"](x[n : n + 1]) * parts["negative"](x[order[n]][None])).sum()
        for n in range(N)
    ]
    rows = [torch.autograd.grad(loss, list(parts.parameters())) for loss in losses]
    model = extend(Pairs())
    with backpack(BatchGrad()):
        model(x).sum().backward()
    for p, own in zip(parts.parameters(), zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(own))  # type: ignore[attr-defined]
