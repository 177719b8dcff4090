"""Rows of the data that are picked before any layer belong to the samples they were picked from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import ShapeError
from backpack_core.extensions import HMP, BatchGrad
from tests.cases import Net
from tests.owned_rows import check_owned_rows

N, T, D, C = 4, 3, 2, 3
Pick = Callable[[Tensor], Tensor]


def _mask(*rows: str) -> Tensor:
    return torch.tensor([[place == "x" for place in row] for row in rows])


MASKS = {
    "as many as samples": _mask("x..", "xx.", "...", ".x."),
    "twice as many": _mask("xxx", "xxx", "x..", "x.."),
    "uneven": _mask("x.x", "xxx", ".x.", "x.."),
}
ORDER = torch.tensor([7, 2, 11, 0, 5, 9, 1, 10, 3, 6, 8, 4])
PICKS: dict[str, Pick] = {
    "as many as samples": lambda z: z[MASKS["as many as samples"]],
    "twice as many": lambda z: z[MASKS["twice as many"]],
    "uneven": lambda z: z[MASKS["uneven"]],
    "pairs": lambda z: z[MASKS["uneven"].nonzero(as_tuple=True)],
    "shuffled": lambda z: z.flatten(0, 1)[ORDER],
    "selected": lambda z: z.flatten(0, 1).index_select(0, ORDER[:8]),
    "repeated": lambda z: z.flatten(0, 1)[torch.tensor([0, 0, 0, 4, 5, 5, 11, 9])],
    "samples in another order": lambda z: z[[2, 0, 3, 1]].flatten(0, 1),
    "by what they are": lambda z: z.flatten(0, 1)[z[..., 0].flatten() > z[0, 1, 0]],
}


def _net(pick: Pick) -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(torch.tanh(net.a(pick(x))))  # type: ignore[no-any-return]

    return Net(forward, a=nn.Linear(D, 4), b=nn.Linear(4, C))


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("way", PICKS)
def test_picked_data(way: str, is_module: bool) -> None:
    x, pick = torch.randn(N, T, D), PICKS[way]
    every, net = torch.arange(1.0 * N)[:, None, None].expand(N, T, 1), _net(pick)
    if way == "by what they are":
        owners = every.flatten()[x[..., 0].flatten() > x[0, 1, 0]].long()
    else:
        owners = pick(every)[:, 0].long()
    logits, parameters = net(x), [*net.parameters()]
    check_owned_rows(
        net, x, torch.arange(len(owners)) % C, logits, owners, parameters, is_module=is_module
    )


def test_picks_that_change_from_pass_to_pass() -> None:
    """A plan of one pass would be wrong in the next."""
    masks = [
        _mask("xx.", "xx.", "xx.", "xx."),
        MASKS["twice as many"],
        _mask("xxx", "xxx", "xx.", "..."),
    ]
    net = _net(lambda z: z[mask])
    for mask in [*masks, *masks]:
        x, parameters = torch.randn(N, T, D), [*net.parameters()]
        owners, logits = mask.nonzero()[:, 0], net(x)
        y = torch.arange(len(owners)) % C
        check_owned_rows(net, x, y, logits, owners, parameters, is_module=True)


def _tokens(pick: Pick | None) -> Net:
    def forward(net: Any, ids: Tensor) -> Tensor:
        tokens = net.table(pick(ids)) if pick else net.table(ids)[MASKS["uneven"]]
        return net.b(torch.tanh(tokens))  # type: ignore[no-any-return]

    return Net(forward, table=nn.Embedding(9, 4), b=nn.Linear(4, C))


IDS = torch.tensor([[1, 2, 3], [4, 2, 5], [6, 1, 7], [8, 2, 0]])


@pytest.mark.parametrize("name", ["as many as samples", "twice as many"])
def test_tokens_that_were_picked_raise(name: str) -> None:
    """Equal ones of several samples do not tell whose they are; behind the table, rows do."""
    net = extend(_tokens(PICKS[name]))
    for _ in range(2):
        logits = net(IDS)
        with (
            pytest.raises(ShapeError, match=r"pick behind the module, layer\(x\)\[mask\]"),
            backpack(BatchGrad()),
        ):
            F.cross_entropy(logits, torch.arange(len(logits)) % C).backward()
    logits = net(IDS)
    with backpack(HMP()):  # which needs no samples
        F.cross_entropy(logits, torch.arange(len(logits)) % C).backward()
    net = extend(_tokens(None))
    with backpack(BatchGrad()):
        F.cross_entropy(net(IDS), torch.arange(7) % C).backward()


CHANGED: dict[str, Pick] = {
    "flat": lambda ids: ids.flatten(),
    "shifted": lambda ids: torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1).flatten(),
    "other ones": lambda ids: ((ids + 1) % 9).flatten(),
    "evenly": lambda ids: ids[:, 1:].flatten(),
}


@pytest.mark.parametrize("way", CHANGED)
def test_tokens_in_order(way: str) -> None:
    change = CHANGED[way]
    net, ids = _tokens(change), IDS
    y = torch.arange(change(ids).numel()) % C
    owners, logits = torch.arange(N).repeat_interleave(len(y) // N), net(ids)
    check_owned_rows(net, ids, y, logits, owners, [*net.parameters()], is_module=True)
