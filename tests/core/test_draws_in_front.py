"""Several draws of each sample on a first axis, which may be as long as the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn

from backpack_core import extend
from tests.cases import Net
from tests.core.first_order import check

DRAWS = 4

Step: TypeAlias = Callable[[Tensor], Tensor]

# Draws [K, N, D] of a hidden value [N, D]: the operation puts a new axis in front.
BROADCAST: dict[str, Step] = {
    "add": lambda h: h + torch.linspace(-1, 1, DRAWS).view(DRAWS, 1, 1),
    "add, with an axis": lambda h: h[None] + torch.linspace(-1, 1, DRAWS).view(DRAWS, 1, 1),
    "mul": lambda h: h * torch.linspace(1, 2, DRAWS).view(DRAWS, 1, 1),
    "addcmul": lambda h: torch.addcmul(h, h, torch.linspace(0, 1, DRAWS).view(DRAWS, 1, 1)),
    "where": lambda h: torch.where(torch.arange(DRAWS).view(DRAWS, 1, 1) > 1, h, h.cos()),
}


def _turned(h: Tensor) -> Tensor:
    return (h[:, None] * torch.linspace(1, 2, DRAWS)[:, None]).transpose(0, 1)


REDUCED: dict[str, Step] = {
    "mean": lambda h: h.mean(0).sum(1),
    "logsumexp": lambda h: h.sum(2).logsumexp(0),
    "logsumexp, several axes": lambda h: h.logsumexp((0, 2)),
    "amax": lambda h: h.amax(0).prod(1),
    "max": lambda h: h.max(0).values.norm(dim=1),
    "median": lambda h: h.median(0, keepdim=True).values.std(2)[0],
    "norm": lambda h: h.norm(dim=(0, 2)),
    "var": lambda h: h.var(0).sum(1),
    "prod": lambda h: h.prod(0, keepdim=True).sum((0, 2)),
}


@pytest.mark.parametrize("samples", [DRAWS, 2, 3, 1])
@pytest.mark.parametrize(
    ("drawn", "reduced"),
    [
        *((draw, REDUCED["logsumexp"]) for draw in BROADCAST.values()),
        *((_turned, reduce) for reduce in REDUCED.values()),
    ],
    ids=[*BROADCAST, *REDUCED],
)
def test_draws_in_front(drawn: Step, reduced: Step, samples: int) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        decoded: Tensor = net.decoder(drawn(torch.tanh(net.encoder(x))))
        return reduced(decoded.sin())

    model = extend(Net(forward, encoder=nn.Linear(3, 2), decoder=nn.Linear(2, 3)))
    x = torch.randn(samples, 3)
    alone = [model(x[n : n + 1]).sum() for n in range(samples)]
    check(model, lambda: model(x).sum(), alone)
