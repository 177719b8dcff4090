"""Models that call none of their modules, ``F.linear(x, self.part.weight)``: no call has a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_core.extensions import BatchDotGrad, BatchGrad
from tests.cases import Net

N, T = 4, 3
Run = Callable[[Tensor], Tensor]
INDEX = {"some": [1, 3], "one": [2], "repeated": [2, 0, 3, 1, 1, 1], "row": 1}
MASK = torch.arange(N * T).view(N, T) % 5 < 2


def picked(index: Any) -> Callable[[Run, Any, Tensor, Tensor], Any]:
    return lambda run, loss, x, y: loss(run(x)[index], y[index])


def in_a_loop(run: Run, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([loss(run(x[n : n + 1]), y[n : n + 1]) for n in range(N)]).sum()


def in_halves(run: Run, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = loss(run(x[:2]), y[:2]) + 0.5 * loss(run(x[2:]), y[2:])
    return found


def by_row(run: Run, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    found = run(x)
    return torch.stack([loss(found[n], y[n]) for n in (0, 2)]).sum()


def flat(run: Run, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss(run(x).flatten(0, -2), y.flatten(0, -2))  # type: ignore[no-any-return]


FORMS: dict[str, tuple[tuple[int, ...], Any]] = {
    **{name: ((), picked(index)) for name, index in INDEX.items()},
    "masked": ((T,), picked(MASK)),
    "flat": ((T,), flat),
    "loop": ((), in_a_loop),
    "halves": ((), in_halves),
    "rows": ((), by_row),
}


def net() -> Net:
    torch.manual_seed(0)
    held = nn.Sequential(nn.Linear(3, 2))
    run: Any = lambda net, x: F.linear(x, net.held[0].weight, net.held[0].bias).tanh()  # noqa: E731
    return Net(run, held=held).double()


def wanted(model: nn.Module, form: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """Each sample's gradient: the outputs of the others are constants."""
    parameters, found = [*model.parameters()], []
    for n in range(N):

        def run(rows: Tensor, n: int = n) -> Tensor:
            own = torch.tensor([row.equal(x[n]) for row in rows])
            out: Tensor = model(rows)
            return torch.where(own.view(-1, *[1] * (out.dim() - 1)), out, out.detach())

        loss = form(run, nn.MSELoss(reduction="sum"), x, y)
        found.append(torch.autograd.grad(loss, parameters))
    return [torch.stack(of) for of in zip(*found, strict=True)]


@pytest.mark.parametrize("name", FORMS)
def test_the_batch_is_what_the_model_received(name: str) -> None:
    axes, form = FORMS[name]
    model, loss = extend(net()), extend(nn.MSELoss(reduction="sum"))
    for _ in range(3):  # later passes may have a plan
        x, y = (torch.randn(N, *axes, size, dtype=torch.float64) for size in (3, 2))
        with backpack(BatchGrad(), BatchDotGrad()):
            form(model, loss, x, y).backward()
        for own, each in zip(model.parameters(), wanted(model, form, x, y), strict=True):
            torch.testing.assert_close(own.grad_batch, each)  # type: ignore[attr-defined]
            gram = each.flatten(1) @ each.flatten(1).T
            torch.testing.assert_close(own.batch_dot, gram)  # type: ignore[attr-defined]


def test_plans_tell_batches_apart() -> None:
    """The same operations on as many picked rows, of more samples."""
    model, loss = extend(net()), extend(nn.MSELoss(reduction="sum"))
    for n in (4, 5, 6, 4):
        x, y = (torch.randn(n, size, dtype=torch.float64) for size in (3, 2))
        with backpack(BatchGrad()):
            loss(model(x)[[1, 3]], y[[1, 3]]).backward()
        found = [*model.parameters()][1].grad_batch  # type: ignore[attr-defined]
        assert found.shape == (n, 2)
        assert found.any(1).tolist() == [row in (1, 3) for row in range(n)]


def test_a_loss_in_the_model() -> None:
    lossfunc = nn.MSELoss(reduction="sum")
    run: Any = lambda net, x, y, index: net.loss(net.inner(x)[index], y[index]) / 2  # noqa: E731
    inner = net()
    model = extend(Net(run, inner=inner, loss=lossfunc))
    x, y = (torch.randn(N, size, dtype=torch.float64) for size in (3, 2))
    with backpack(BatchGrad()):
        model(x, y, torch.tensor([1, 3])).backward()
    form: Any = lambda run, loss, x, y: loss(run(x)[[1, 3]], y[[1, 3]]) / 2  # noqa: E731
    for own, each in zip(model.parameters(), wanted(inner, form, x, y), strict=True):
        torch.testing.assert_close(own.grad_batch, each)  # type: ignore[attr-defined]


def test_a_model_on_picked_rows_of_another() -> None:
    first, second = extend(net()), extend(nn.Linear(2, 2).double())
    x, y = (torch.randn(N, size, dtype=torch.float64) for size in (3, 2))
    form: Any = lambda run, loss, x, y: loss(second(run(x)[[1, 3]]), y[[1, 3]])  # noqa: E731
    with backpack(BatchGrad()):
        form(first, extend(nn.MSELoss(reduction="sum")), x, y).backward()
    for own, each in zip(first.parameters(), wanted(first, form, x, y), strict=True):
        torch.testing.assert_close(own.grad_batch, each)  # type: ignore[attr-defined]
    found = second.bias.grad_batch  # type: ignore[attr-defined]
    assert found.any(1).tolist() == [False, True, False, True]


def test_a_model_behind_what_others_computed() -> None:
    model, scale = extend(net()), torch.ones(3, dtype=torch.float64, requires_grad=True)
    x, y = (torch.randn(N, size, dtype=torch.float64) for size in (3, 2))
    form: Any = lambda run, loss, x, y: loss(run(x * scale)[[1, 3]], y[[1, 3]])  # noqa: E731
    with backpack(BatchGrad()):
        form(model, extend(nn.MSELoss(reduction="sum")), x, y).backward()
    for own, each in zip(model.parameters(), wanted(model, form, x, y), strict=True):
        torch.testing.assert_close(own.grad_batch, each)  # type: ignore[attr-defined]


def test_told_samples_must_fit() -> None:
    model, loss = extend(net()), extend(nn.MSELoss(reduction="sum"))
    x, y = (torch.randn(N, size, dtype=torch.float64) for size in (3, 2))
    given, expected = torch.tensor([0, 1, 1, 2, 2]), "has 5 entries, and the model received 4 rows"
    with pytest.raises(UsageError, match=expected), backpack(BatchGrad(), samples=given):
        loss(model(x), y).backward()
