"""Idioms of models: views of a batch, sorted samples, rows without padding, queries, experts, …"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.nets.kinds import Shapes, axes, module, need
from tests.nets.recipe import Settings


class Parts(nn.Module):
    """Layers and parameters that idioms use; those that one does not use get no gradient."""

    def __init__(self, width: int, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.wide, self.cell = nn.Linear(width, 3 * width), nn.GRUCell(width, width)
        self.sequence = nn.GRU(width, width, batch_first=True)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.nets = nn.Parameter(torch.empty(3, width, width))
        self.queries = nn.Parameter(torch.empty(2, width))
        self.gain = nn.Parameter(torch.empty(width))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _order(x: Tensor) -> Tensor:
    return x.detach().flatten(1).sum(1).argsort()


def _kept(x: Tensor) -> Tensor:
    mask = x.detach()[..., 0] > -0.4
    mask[:, 0] = True
    return mask


def _compared(p: Any, x: Tensor) -> Tensor:
    first, second = p.one(torch.cat([x, x.flip(-1)])).chunk(2)
    found: Tensor = (first - second).abs()
    return found


def _crossed(p: Any, x: Tensor) -> Tensor:
    both = p.one(torch.cat([x, x.sin()])).view(2, *x.shape)
    found: Tensor = p.two(both[0]) * both[1].detach() + p.two(both[1]) * both[0].detach()
    return found


def _tiled(p: Any, x: Tensor) -> Tensor:
    found: Tensor = p.one(torch.cat([x, 1.1 * x, 1.2 * x]).tanh())
    return found.view(3, *x.shape).mean(0)


def _by_expert(p: Any, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    chosen = (9 * tokens.detach().sum(-1)).long() % 3
    order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=3).tolist()
    parts = zip(p.experts, tokens[order].split(counts), strict=True)
    return torch.cat([e(part) for e, part in parts])[order.argsort()].view_as(x)


def _stopped_early(p: Any, x: Tensor) -> Tensor:
    is_done = x.detach().flatten(1).sum(1) > 0
    parts = torch.cat([p.one(x[is_done]), p.two(x[~is_done])])
    return parts[torch.cat([is_done.nonzero()[:, 0], (~is_done).nonzero()[:, 0]]).argsort()]


def _quantized(p: Any, x: Tensor) -> Tensor:
    z = p.one(x)
    nearest = (z.unsqueeze(-2) - p.queries).square().sum(-1).argmin(-1)
    codes = F.embedding(nearest, p.queries)
    return torch.cat([z + (codes - z).detach(), (codes - z.detach()).square()], -1)


ANY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "compared": _compared,
    "crossed": _crossed,
    "tiled": _tiled,
    "repeated": lambda p, x: p.one(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).amax(1),
    "sorted": lambda p, x: p.one(x[(o := _order(x))]).tanh()[o.argsort()],
    "put_back": lambda p, x: torch.empty_like(x).index_copy(0, (o := _order(x)), p.one(x[o])),
    "by_expert": _by_expert,
    "stopped_early": _stopped_early,
    "members": lambda p, x: torch.vmap(lambda w: (x @ w).tanh())(p.nets).mean(0),
    "layers_stacked": lambda p, x: torch.stack([e(x) for e in p.experts]).logsumexp(0),
    "layers_joined": lambda p, x: torch.cat([e(x) for e in p.experts]).view(3, *x.shape).std(0),
    "quantized": _quantized,
    "density": lambda p, x: torch.distributions.Normal(
        p.one(x), F.softplus(p.two(x)) + 0.3
    ).log_prob(x.detach().sin()),
    "adapted": lambda p, x: F.linear(x, p.one.weight.detach()) + (x @ p.queries.T) @ p.queries,
    "gated": lambda p, x: (p.wide(x).split([x.shape[-1], 2 * x.shape[-1]], -1)[1]).sigmoid(),
    "overwritten": lambda p, x: p.one(x[None])[0].mul_(1.5),
}


def _unpadded(p: Any, x: Tensor) -> Tensor:
    mask = _kept(x)
    return torch.stack([part.mean(0) for part in p.one(x[mask]).split(mask.sum(1).tolist())])


def _sorted_sequences(p: Any, x: Tensor) -> Tensor:
    order = _order(x)
    found: Tensor = p.sequence(x.index_select(0, order))[0]
    return found.index_select(0, order.argsort())


def _cached(p: Any, x: Tensor) -> Tensor:
    keys, values, found = x[:, :0], x[:, :0], []
    for step in x.split(1, 1):
        query, key, value = p.wide(step).chunk(3, -1)
        keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        found.append((query @ keys.mT).softmax(-1) @ values)
    return torch.cat(found, 1)


def _slots(p: Any, x: Tensor) -> Tensor:
    slots = p.queries.expand(len(x), -1, -1)
    for _ in range(2):
        read = (x @ p.one(slots).mT).softmax(-1).mT @ x
        slots = p.cell(read.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
    found: Tensor = slots
    return found


def _of_graphs(p: Any, x: Tensor) -> Tensor:
    nodes, graph = x.flatten(0, 1), torch.arange(len(x)).repeat_interleave(x.shape[1])
    score = p.one(nodes)[:, :1].exp()
    total = torch.zeros_like(score[: len(x)]).index_add(0, graph, score)
    found = torch.zeros_like(nodes[: len(x)])
    return found.index_add(0, graph, score / total[graph] * p.two(nodes))


OF_SEQUENCES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "unpadded": _unpadded,
    "sorted_sequences": _sorted_sequences,
    "cached": _cached,
    "slots": _slots,
    "graphs": _of_graphs,
    "time_first": lambda p, x: p.one(x.transpose(0, 1)).tanh().transpose(0, 1),
    "last_axis": lambda p, x: torch.einsum("tcn,dc->ntd", x.permute(1, 2, 0), p.one.weight),
    "filtered": lambda p, x: torch.fft.irfft(
        torch.fft.rfft(x, dim=1) * torch.complex(p.gain, p.gain.sin()), n=x.shape[1], dim=1
    ),
    "pairs": lambda p, x: p.one((x[:, :, None] * x[:, None]).flatten(0, 2)).view(
        len(x), -1, x.shape[-1]
    ),
}


def _draw(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 1, 2)
    need(shapes[0][-1] > 1)
    is_sequence = len(shapes[0]) == 2 and random.random() < 0.5
    table = OF_SEQUENCES if is_sequence else ANY
    return {"name": random.choice(sorted(table)), "inside": random.random() < 0.4}


def _run(part: Any, settings: Settings, x: Tensor) -> Tensor:
    """Inside of a module of its own, or in the forward pass of the net."""
    found: Tensor = part(x) if settings["inside"] else part.run(part, x)
    return found


def _make(settings: Settings, shapes: Shapes) -> nn.Module:
    return Parts(shapes[0][-1], {**ANY, **OF_SEQUENCES}[settings["name"]])


module("Idiom", _make, _draw, _run, weight=10, traits="source")
