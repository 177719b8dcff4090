"""Entries that were picked from what parameters and data give before any layer have owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import BatchDiagGGNExact, BatchGrad
from tests import oracle
from tests.cases import Net
from tests.owned_rows import check_owned_rows

N, T, D = 3, 4, 2


def _ids(x: Tensor) -> Tensor:
    return (10 * x[..., 0].abs()).long() % T


# What parameters ``p`` [T, D], ``g`` [D] and ``w`` [D, D] make of data [N, T, D].
MEETINGS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "positions": lambda net, x: x + net.p,
    "gate": lambda net, x: net.g * x,
    "gate and positions": lambda net, x: net.g.exp() * x + net.p[None],
    "nonlinear": lambda net, x: torch.tanh(x * net.g + 1),
    "product": lambda net, x: x @ net.w,
    "linear": lambda net, x: F.linear(x, net.w, net.g),
    "einsum": lambda net, x: torch.einsum("ntd,de->nte", x, net.w),
    "looked up": lambda net, x: F.embedding(_ids(x), net.p),
    "indexed": lambda net, x: net.p[_ids(x)],
    "normalised": lambda net, x: F.layer_norm(x, (D,), net.g),
    "where": lambda net, x: torch.where(x > 0, x, net.p),
    "class token": lambda net, x: torch.cat([net.g.expand(len(x), 1, D), x[:, 1:]], 1),
    "repeated queries": lambda net, x: net.p.unsqueeze(0).repeat(len(x), 1, 1) * x,
    "expanded queries": lambda net, x: net.p.expand(len(x), T, D) + x,
    "queries alone": lambda net, x: net.p.unsqueeze(0).repeat(len(x), 1, 1),
}
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda z: z,
    "stack": lambda z: torch.stack([*z.unbind(1)], 1),
    "transpose": lambda z: z.transpose(0, 1).contiguous().transpose(0, 1),
    "cat": lambda z: torch.cat([z[:, :2], z[:, 2:]], 1),
}
# As many as there are samples or twice, three times as many, unevenly; and another number.
PLACES = {
    3: ([0, 0, 2], [1, 3, 2]),
    5: ([0, 0, 1, 1, 1], [1, 2, 0, 1, 3]),
    6: ([0, 0, 0, 1, 2, 2], [0, 1, 3, 2, 0, 1]),
    9: ([0, 0, 0, 0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 1, 0, 1, 2, 3]),
}


def _mask(rows: Tensor, steps: Tensor) -> Tensor:
    mask = torch.zeros(N, T, dtype=torch.bool)
    mask[rows, steps] = True
    return mask


PICKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mask": lambda z, rows, steps: z[_mask(rows, steps)],
    "pairs": lambda z, rows, steps: z[rows, steps],
    "flat": lambda z, rows, steps: z.flatten(0, 1)[rows * T + steps],
    "flat mask": lambda z, rows, steps: z.reshape(-1, D)[_mask(rows, steps).flatten()],
    "selected": lambda z, rows, steps: z.flatten(0, 1).index_select(0, rows * T + steps),
}


class Raw(nn.Module):
    """Parameters that meet data before any layer; a head for what is picked, if any."""

    def __init__(self, meeting: str, move: str, pick: str, count: int, has_head: bool) -> None:
        super().__init__()
        self.p, self.g = nn.Parameter(torch.randn(T, D)), nn.Parameter(torch.randn(D))
        self.w = nn.Parameter(torch.randn(D, D))
        self.head = nn.Linear(D, D) if has_head else nn.Identity()
        self.meet, self.move, self.pick = MEETINGS[meeting], MOVES[move], PICKS[pick]
        self.places = [torch.tensor(numbers) for numbers in PLACES[count]]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pick(self.move(self.meet(self, x)), *self.places))  # type: ignore[no-any-return]


def _check(model: Raw, is_module: bool) -> None:
    model, x = model.double(), torch.randn(N, T, D).double()
    logits, owners = model(x), model.places[0]
    y, parameters = torch.randint(D, (len(logits),)), [*model.parameters()]
    used = torch.autograd.grad(logits.sum(), parameters, retain_graph=True, allow_unused=True)
    parameters = [p for p, u in zip(parameters, used, strict=True) if u is not None]
    check_owned_rows(model, x, y, logits, owners, parameters, is_module)


@pytest.mark.grid(4)
@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("count", PLACES)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_where_parameters_meet_data(
    meeting: str, count: int, has_head: bool, is_module: bool
) -> None:
    _check(Raw(meeting, "nothing", "mask", count, has_head), is_module)


@pytest.mark.grid(4)
@pytest.mark.parametrize("count", PLACES)
@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("meeting", ["positions", "product"])
def test_ways_to_pick(meeting: str, move: str, pick: str, count: int) -> None:
    _check(Raw(meeting, move, pick, count, has_head=False), is_module=True)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("count", PLACES)
def test_a_table_as_long_as_the_batch(count: int, is_module: bool) -> None:
    """Its rows are positions, whatever function looks them up."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.g = nn.Parameter(torch.randn(N, D)), nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> Tensor:
            h = x * self.g + F.embedding(torch.arange(N), self.p) + self.p[torch.arange(N)]
            return h[rows, steps]  # type: ignore[no-any-return]

    rows, steps = (torch.tensor(numbers) % N for numbers in PLACES[count])
    model, x, y = Table().double(), torch.randn(N, N, D).double(), torch.randint(D, (count,))
    terms = F.cross_entropy(model(x), y, reduction="none")
    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum")) if is_module else None
    with backpack(BatchGrad(), check="always"):
        logits = extend(model)(x)
        loss = F.cross_entropy(logits, y, reduction="sum") if lossfunc is None else None
        (lossfunc(logits, y) if loss is None else loss).backward()  # type: ignore[misc]
    for n in range(N):
        own = terms[rows == n].sum() + 0 * terms.sum()
        gradients = torch.autograd.grad(own, [*model.parameters()], retain_graph=True)
        for parameter, expected in zip(model.parameters(), gradients, strict=True):
            oracle.assert_close(vars(parameter)["grad_batch"][n], expected)


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
@pytest.mark.parametrize("picks", [[0, 1, 2, 7], [1, 6, 7, 8], [0, 8, 3], [5, 4, 4, 2, 9, 0]])
@pytest.mark.parametrize("body", ["changed", "frozen"])
def test_rows_that_are_picked_behind_merged_data(
    body: str, picks: list[int], is_module: bool
) -> None:
    """Nothing tells whose the merged rows are but their order: which are picked, does."""
    torch.manual_seed(0)
    frozen, head = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)

    def forward(net: Any, x: Tensor) -> Tensor:
        h = x / 2 + 1 if body == "changed" else torch.tanh(net.frozen(x))
        return net.head(h.flatten(0, 1).sin())  # type: ignore[no-any-return]

    net, x = extend(Net(forward, frozen=frozen, head=head)), torch.randn(2, 5, 3)
    y, which = torch.randint(3, (len(picks),)), torch.tensor(picks)
    lossfunc: Any = extend(nn.CrossEntropyLoss()) if is_module else F.cross_entropy
    loss = lossfunc(net(x)[which], y)
    with backpack(BatchGrad(), *([BatchDiagGGNExact()] if is_module else [])):
        loss.backward()
    for n in range(2):
        own = which // 5 == n
        alone = F.cross_entropy(net(x)[which][own], y[own], reduction="sum")
        grads = torch.autograd.grad(alone / len(picks), [*head.parameters()])
        for p, grad in zip(head.parameters(), grads, strict=True):
            oracle.assert_close(p.grad_batch[n], grad)
        if is_module:
            rows = net(x)[which][own].softmax(1).detach()
            diagonal = (rows - rows**2).sum(0) / len(picks)
            oracle.assert_close(head.bias.diag_ggn_exact_batch[n], diagonal)
