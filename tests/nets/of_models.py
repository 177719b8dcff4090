"""What models do between modules: masks, picked entries, messages, normalised weights."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.nets.kinds import Shapes, axes, function, module, need
from tests.nets.recipe import Settings


def _kept(x: Tensor) -> Tensor:
    """A mask over positions that depends on the data; the first one counts in any case."""
    mask = x.detach()[..., 0] > -0.2
    mask[:, 0] = True
    return mask


def _masked_mean(x: Tensor) -> Tensor:
    mask = _kept(x)[..., None].to(x.dtype)
    return (x * mask).sum(1) / mask.sum(1)


def _padded_attention(x: Tensor) -> Tensor:
    scores = (x @ x.mT).masked_fill(~_kept(x)[:, None], float("-inf"))
    return scores.softmax(-1) @ x


def _fused_padded_attention(x: Tensor) -> Tensor:
    mask = _kept(x)[:, None].expand(-1, x.shape[1], -1)
    return F.scaled_dot_product_attention(x, x.roll(1, 2), x, attn_mask=mask)


def _messages(x: Tensor) -> Tensor:
    """From node to node inside of each graph."""
    source, target = torch.arange(x.shape[1]).roll(1), torch.arange(x.shape[1]) // 2
    return x + torch.zeros_like(x).index_add(1, target, torch.tanh(x[:, source]))


def _scattered(x: Tensor) -> Tensor:
    order = x.detach().argsort(1)
    return x + torch.zeros_like(x).scatter_add(1, order, x.flip(1))


def _routed_by_argmax(x: Tensor) -> Tensor:
    return x * F.one_hot(x.detach().sin().argmax(-1), x.shape[-1])


OF_SEQUENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_mean": _masked_mean,
    "padded_attention": _padded_attention,
    "fused_padded_attention": _fused_padded_attention,
    "messages": _messages,
    "scattered": _scattered,
    "argmax": _routed_by_argmax,
    "last": lambda x: x[torch.arange(len(x)), _kept(x).sum(1) - 1],
    "gathered": lambda x: x.gather(1, (_kept(x).sum(1) - 1)[:, None, None].expand_as(x[:, :1])),
    "some": lambda x: x[:, [x.shape[1] - 1, 0]],
    "first_and_mean": lambda x: torch.cat([x[:, 0], x.mean(1)], 1),
    "where_kept": lambda x: torch.where(_kept(x)[..., None], x, x.detach().sin()),
    "softmax_pool": lambda x: (x[..., :1].softmax(1) * x).sum(1),
    "shifted": lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)) + x,
}


def _draw_of_sequences(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2)
    return {"name": random.choice(sorted(OF_SEQUENCES))}


function("of_sequences", lambda s, x: OF_SEQUENCES[s["name"]](x), _draw_of_sequences, weight=4)


def _standardized(weight: Tensor) -> Tensor:
    return (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 0.3)


# What a function makes of a weight before it is used.
WEIGHTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cosine": lambda part, x: F.linear(F.normalize(x + 0.1, dim=-1), F.normalize(part.weight)),
    "standardized": lambda part, x: F.linear(x, _standardized(part.weight), part.bias),
    "symmetric": lambda part, x: x @ (part.weight + part.weight.T),
    "masked": lambda part, x: F.linear(x, part.weight.tril(), part.bias),
    "scaled": lambda part, x: F.linear(x, part.weight / part.weight.detach().norm(), part.bias),
    "both": lambda part, x: part(x) + F.linear(x.sin(), F.normalize(part.weight)),
}


def _draw_weights(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 1, 2)
    need(shapes[0][-1] > 1)
    return {"name": random.choice(sorted(WEIGHTS))}


module(
    "OfWeights",
    lambda s, shapes: nn.Linear(shapes[0][-1], shapes[0][-1]),
    _draw_weights,
    lambda part, s, x: WEIGHTS[s["name"]](part, x),
    weight=3,
    traits="trap",
)


class Counting(nn.Module):
    """Keeps a running mean, which it does not read, and scales by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * x.mean())
        return 0.7 * x


module("Counting", lambda s, shapes: Counting())


def _assigned(part: Any, x: Tensor) -> Tensor:
    found, mask = torch.zeros_like(x), _kept(x)
    found[mask] = part(x[mask])
    return found + x


def _added(part: Any, x: Tensor) -> Tensor:
    samples, positions = _kept(x).nonzero(as_tuple=True)
    return x.index_put((samples, positions), part(x[samples, positions]), accumulate=True)


def _pooled(part: Any, x: Tensor) -> Tensor:
    mask = _kept(x)
    found = part(x[mask])
    return torch.zeros_like(x[:, 0]).index_add(0, mask.nonzero()[:, 0], found)


def _of_some_samples(part: Any, x: Tensor) -> Tensor:
    chosen = (x.detach()[:, 0, 0] > 0).nonzero()[:, 0]
    return x + torch.zeros_like(x).index_add(0, chosen, part(x[chosen]))


def _steps(part: Any, x: Tensor) -> Tensor:
    """All steps, one behind the other, in one batch."""
    found = part(torch.cat([x[:, t] for t in range(x.shape[1])]))
    return torch.stack(found.split(len(x)), 1)


# A module that receives some entries only; what it gives is put back.
PUT_BACK: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "assigned": _assigned,
    "added": _added,
    "pooled": _pooled,
    "samples": _of_some_samples,
    "last": lambda part, x: part(x[torch.arange(len(x)), _kept(x).sum(1) - 1]),
    "flat": lambda part, x: part(x.flatten(0, 1)[torch.arange(len(x)) * x.shape[1]]),
    "steps": _steps,
}


def _run_put_back(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    return PUT_BACK[settings["name"]](part, x)


def _draw_put_back(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2)
    return {"name": random.choice(sorted(PUT_BACK)), "hidden": random.random() < 0.4}


def _make_put_back(settings: Settings, shapes: Shapes) -> nn.Module:
    width = shapes[0][-1]
    if settings["hidden"]:
        return nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, width))
    return nn.Linear(width, width)


module("PutBack", _make_put_back, _draw_put_back, _run_put_back, weight=6, traits="trap")
