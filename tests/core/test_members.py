"""Several nets in one tensor of weights: their axis comes before that of the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchGrad
from tests.oracle import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")

D, C = 3, 2


class Members(nn.Module):
    """Linear nets ``[M, D, C]``, and how they are applied to ``[N, D]``, to give ``[M, N, C]``."""

    def __init__(self, apply: Callable[[Tensor, Tensor], Tensor], members: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(members, D, C, dtype=torch.double))
        self.apply_all = apply

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_all(x, self.weights).sin()


def _repeated(x: Tensor, w: Tensor) -> Tensor:
    return x.repeat(len(w), 1).view(len(w), -1, D) @ w


APPLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "bmm": lambda x, w: torch.bmm(x.expand(len(w), -1, -1), w),
    "baddbmm": lambda x, w: torch.baddbmm(w[:, :1], x.expand(len(w), -1, -1), w),
    "einsum": lambda x, w: torch.einsum("nd,mdc->mnc", x, w),
    "vmap": lambda x, w: torch.vmap(lambda one: x @ one)(w),
    "second factor": lambda x, w: (w.mT @ x.T).mT,
    "entries": lambda x, w: (x[None, :, :, None] * w[:, None]).sum(2),
    "loop": lambda x, w: torch.stack([x @ one for one in w]),
    "copies": _repeated,
    "changed data": lambda x, w: (2 * x) @ w,
    "changed copies": lambda x, w: _repeated(F.layer_norm(x, (D,)), w),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.repeat(len(out))),
    "samples in front": lambda out, y: F.cross_entropy(
        out.transpose(0, 1).flatten(0, 1), y.repeat_interleave(len(out))
    ),
    "mean of the members": lambda out, y: F.cross_entropy(out.mean(0), y),
    "late, samples in front": lambda out, y: (
        (out.transpose(0, 1) - y[:, None, None]).square().mean()
    ),
}
LATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of all": lambda out, y: (out - y[:, None]).square().mean(),
    "of each member": lambda out, y: (out - y[:, None]).square().mean((1, 2)).sum() / len(out),
    "best member": lambda out, y: (
        (out - y[:, None]).square().mean((1, 2)).sum() + (out - y[:, None]).amin(0).mean()
    ),
}


def _of_each(model: Members, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    def of_one(n: int) -> Tensor:
        own = loss(model(x[n : n + 1]), y[n : n + 1]) / len(x)
        return torch.autograd.grad(own, model.weights)[0]

    return torch.stack([of_one(n) for n in range(len(x))])


@pytest.mark.grid(3)
@pytest.mark.parametrize(("members", "samples"), [(3, 4), (4, 4), (4, 2), (3, 1), (1, 3)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", APPLY)
def test_members_before_samples(name: str, loss: str, members: int, samples: int) -> None:
    torch.manual_seed(0)
    model = extend(Members(APPLY[name], members))
    y = torch.arange(samples) % C
    for number in range(6):
        x = torch.randn(samples, D, dtype=torch.double)
        x = x.T.contiguous().T if number == 4 else x
        with backpack(BatchGrad()):
            LOSSES[loss](model(x), y).backward()
        assert_close(model.weights.grad_batch, _of_each(model, LOSSES[loss], x, y))


@pytest.mark.plans
def test_passes_are_planned() -> None:
    model, y = extend(Members(APPLY["matmul"], 3)), torch.arange(4) % C
    for _ in range(12):
        loss = LOSSES["flat"](model(torch.randn(4, D, dtype=torch.double)), y)
        with backpack(BatchGrad()) as block:
            loss.backward()
    assert "planned before" in block.summary().passes


@pytest.mark.parametrize(("members", "samples"), [(3, 4), (4, 4), (4, 2), (1, 3)])
@pytest.mark.parametrize("loss", LATE)
@pytest.mark.parametrize("name", APPLY)
def test_losses_that_begin_at_members(name: str, loss: str, members: int, samples: int) -> None:
    """As many members as samples are no samples; the message says what is exact, see above."""
    torch.manual_seed(0)
    model, y = extend(Members(APPLY[name], members)), torch.arange(samples).double()
    x = torch.randn(samples, D, dtype=torch.double)
    cause = "Have the model return samples in front"
    cause = cause if members > 1 else f"{cause}|not by way of any sample"
    with pytest.raises(UnsupportedError, match=cause), backpack(BatchGrad()):
        LATE[loss](model(x), y).backward()
