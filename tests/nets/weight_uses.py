"""Ways to use weights: factors, shares, loops, layouts; functions in the place of modules."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.nets.kinds import Shapes, axes, module, need
from tests.nets.own_functions import Dot
from tests.nets.recipe import Settings


class Weights(nn.Module):
    """Two square matrices, a narrow one, and two vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.empty(width, width)) for _ in range(2))
        self.narrow = nn.Parameter(torch.empty(2, width))
        self.v, self.w = (nn.Parameter(torch.empty(width)) for _ in range(2))


def _filled(p: Any) -> Tensor:
    buffer = torch.zeros_like(p.a)
    buffer[0] = p.v
    buffer[1:] = p.b[1:]
    return buffer


def _mapped(p: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda weight: x @ weight, out_dims=1)(torch.stack([p.a, p.b])).sum(1)


def _written_in(p: Any, x: Tensor) -> Tensor:
    mask = x.detach() > 0.2
    return torch.where(mask, p.v, x) + x.masked_fill(~mask, 0.0)


def _by_index(p: Any, x: Tensor) -> Tensor:
    return x * p.a[x.detach().sin().argmax(-1)] + F.embedding(x.detach().argmax(-1), p.b)


def _complex(p: Any, x: Tensor) -> Tensor:
    return (torch.complex(x, x.sin()) @ torch.complex(p.a, p.b)).real


def _per_row(p: Any, x: Tensor) -> Tensor:
    """One matrix for each sample, by the trick with groups."""
    kernels = torch.einsum("ni,io,ij->nij", x.flatten(1)[:, : len(p.v)], p.a, p.b)
    rows = x.flatten(1)[:, : len(p.v)].reshape(1, -1, 1)
    return F.conv1d(rows, kernels.flatten(0, 1)[..., None], groups=len(x)).view(len(x), -1)


# What takes any number of axes, with features on the last.
USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "product": lambda p, x: x @ (p.a @ p.b),
    "low_rank": lambda p, x: F.linear(x, p.a + p.narrow.T @ p.narrow),
    "two_steps": lambda p, x: (x @ p.narrow.T).sin() @ p.narrow,
    "gated": lambda p, x: F.linear(x, p.a * torch.sigmoid(p.b), p.v),
    "rows_scaled": lambda p, x: F.linear(x, p.a * p.v[:, None] / p.a.norm(dim=1, keepdim=True)),
    "kron": lambda p, x: x @ torch.kron(p.narrow[:1, :1], p.a),
    "cat": lambda p, x: F.linear(x, torch.cat([p.a, p.narrow]), torch.cat([p.v, p.w[:2]])),
    "stack": lambda p, x: torch.stack([p.v, p.w])[x.shape[-1] % 2] * x,
    "filled": lambda p, x: F.linear(x, _filled(p)),
    "orthogonal": lambda p, x: x @ torch.matrix_exp(p.a - p.a.T),
    "inverted": lambda p, x: x @ torch.linalg.inv(3 * torch.eye(len(p.a)) + p.a @ p.a.T),
    "softmax": lambda p, x: x @ p.a.softmax(0) + x * p.v.softmax(0),
    "quadratic": lambda p, x: torch.einsum("...i,ij,...j->...i", x, p.a, x.cos()),
    "both_sides": lambda p, x: torch.einsum("...i,ij,jk->...k", x, p.a, p.a),
    "prototypes": lambda p, x: (x.unsqueeze(-2) - p.narrow).square().sum(-1).neg().exp(),
    "complex": _complex,
    "filter": lambda p, x: torch.fft.ifft(torch.fft.fft(x) * torch.complex(p.v, p.w)).real,
    "circulant": lambda p, x: x @ torch.stack([p.v.roll(k) for k in range(len(p.v))]),
    "lerp": lambda p, x: torch.lerp(x, x.sin(), p.v),
    "addcmul": lambda p, x: torch.addcmul(x, p.v, x.cos(), value=0.5),
    "prelu": lambda p, x: torch.where(x > 0, p.v * x, p.w * x),
    "power": lambda p, x: (x.square() + 0.5).pow(torch.sigmoid(p.v)),
    "layer_norm": lambda p, x: F.layer_norm(x, p.v.shape, p.v, p.w, 0.1),
    "rms_norm": lambda p, x: F.rms_norm(x, p.v.shape, p.v * p.w, 0.1),
    "expanded": lambda p, x: x + p.v.expand_as(x) * p.w.expand(x.shape),
    "halves": lambda p, x: F.linear(x, p.a.detach(), p.v) + F.linear(x.detach(), p.a),
    "own_function": lambda p, x: Dot.apply(x, p.a) + p.v,
    "mapped": lambda p, x: torch.vmap(lambda row: (row @ p.a).tanh())(x),
    "ensemble": _mapped,
    "loop": lambda p, x: torch.stack([row @ p.a for row in x]),
    "last_first": lambda p, x: torch.tensordot(p.a, x, ([1], [x.dim() - 1])).movedim(0, -1),
    "batch_last": lambda p, x: (p.a @ x.flatten(0, -2).T + p.v[:, None]).T.reshape(x.shape),
    "mask_token": _written_in,
    "by_index": _by_index,
    "twice": lambda p, x: ((x @ p.a).sin() @ p.a.T) @ p.a,
    "decayed": lambda p, x: x * (-torch.arange(1.0, 1 + len(p.v)) * F.softplus(p.v)).exp(),
    "sorted": lambda p, x: x * p.v.sort().values + p.w.cumsum(0),
    "spectral": lambda p, x: x @ (p.a / torch.linalg.matrix_norm(p.a)),
    "outer": lambda p, x: x @ torch.outer(p.v, p.w),
    "temperature": lambda p, x: (x / F.softplus(p.v.sum())).softmax(-1) + p.w.mean(),
    "grouped": _per_row,
    "bilinear": lambda p, x: F.bilinear(x, x.tanh(), torch.stack([p.a, p.b]), p.v[:2]),
    "checkpoint": lambda p, x: checkpoint(
        lambda y, a: (y @ a).tanh() @ p.b, x, p.a, use_reentrant=False
    ),
}


def _learned_queries(p: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(p.narrow.expand(len(x), -1, -1), x @ p.a, x)


def _scanned(p: Any, x: Tensor) -> Tensor:
    state = p.v.expand(len(x), -1)
    for step in x.unbind(1):
        state = torch.tanh(step @ p.a + state @ p.b)
    return state


def _decaying_scan(p: Any, x: Tensor) -> Tensor:
    """A state-space layer."""
    states, state = [], torch.zeros_like(x[:, 0])
    for step in x.unbind(1):
        state = torch.sigmoid(p.v) * state + p.w * step
        states.append(state)
    return torch.stack(states, 1)


# What takes sequences, ``[N, T, C]``.
OF_SEQUENCES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "queries": _learned_queries,
    "pooling": lambda p, x: ((x @ p.v).softmax(1)[..., None] * x).sum(1),
    "scores": lambda p, x: (x @ p.a @ x.mT).softmax(-1) @ x,
    "relative": lambda p, x: (x @ x.mT + p.a[0, 0] * torch.ones(x.shape[1], x.shape[1]).tril()) @ x,
    "depthwise": lambda p, x: F.conv1d(x.mT, p.narrow.T[:, None], groups=x.shape[2]).mT,
    "conv": lambda p, x: F.conv1d(x.mT, torch.stack([p.a, p.b], 2), p.v, padding=1).mT,
    "conv_transpose": lambda p, x: F.conv_transpose1d(x.mT, torch.stack([p.a, p.b], 2)).mT,
    "scanned": _scanned,
    "state_space": _decaying_scan,
    "sequence_first": lambda p, x: (x.transpose(0, 1) @ p.a + p.v).tanh().transpose(0, 1),
    "sequence_last": lambda p, x: torch.einsum("oc,tcn->not", p.a, x.permute(1, 2, 0)).mT,
    "bmm": lambda p, x: torch.bmm(x, p.a.expand(len(x), -1, -1)) + p.v,
    "baddbmm": lambda p, x: torch.baddbmm(p.w, x, p.b.expand(len(x), -1, -1), beta=0.5),
    "table": lambda p, x: x + torch.outer(torch.linspace(-1, 1, x.shape[1]), p.v).sin(),
    "begin": lambda p, x: torch.cat([p.narrow.expand(len(x), -1, -1), x], 1),
    "rotated": lambda p, x: (
        (
            torch.complex(x, x.roll(1, 2))
            * torch.polar(p.v.abs() + 1, torch.outer(torch.arange(x.shape[1]) * 1.0, p.w))
        ).real
    ),
    "group_norm": lambda p, x: F.group_norm(x.mT, 1, p.v, p.w, 0.1).mT,
    "instance_norm": lambda p, x: F.instance_norm(x.mT, weight=p.v, bias=p.w, eps=0.1).mT,
}


def _draw_use(random: Random, shapes: Shapes) -> dict[str, Any]:
    need(shapes[0][-1] > 1)
    is_sequence = len(shapes[0]) == 2 and random.random() < 0.4
    if is_sequence:
        return {"name": random.choice(sorted(OF_SEQUENCES)), "sequence": True}
    axes(shapes[0], 1, 2)
    return {"name": random.choice(sorted(USES))}


def _run_use(part: nn.Module, settings: Settings, x: Tensor) -> Tensor:
    table = OF_SEQUENCES if settings.get("sequence") else USES
    return table[settings["name"]](part, x)


module(
    "Uses", lambda s, shapes: Weights(shapes[0][-1]), _draw_use, _run_use, weight=14, traits="trap"
)


class Wrapped(Weights):
    """The same by a module of its own, in whose forward pass parameters are used."""

    def __init__(self, width: int, settings: Settings) -> None:
        super().__init__(width)
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        return _run_use(self, self.settings, x)


module("Wrapped", lambda s, shapes: Wrapped(shapes[0][-1], s), _draw_use, weight=4)


def _parts_of_batch(part: Any, x: Tensor) -> Tensor:
    first = len(x) // 2
    return torch.cat([part(x[:first]), part(x[first:])])


def _siamese(part: Any, x: Tensor) -> Tensor:
    both = part(torch.cat([x, x.flip(-1)]))
    return (both[: len(x)] - both[len(x) :].detach()).sin()


def _drawn_twice(part: Any, x: Tensor) -> Tensor:
    noise = torch.linspace(0.5, 1.5, 2).view(-1, *[1] * x.dim())
    return part((noise * x).flatten(0, 1)).unflatten(0, (2, len(x))).mean(0)


def _drawn_twice_inside(part: Any, x: Tensor) -> Tensor:
    many = part(x.repeat_interleave(2, 0))
    return many.view(len(x), 2, *many.shape[1:]).square().mean(1)


def _relaxed(part: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x - 0.3 * torch.tanh(part(x))
    return x


def _implicit(part: Any, x: Tensor) -> Tensor:
    """A fixed point, differentiated at its last step."""
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(3):
            z = torch.tanh(part(z) + x)
    return torch.tanh(part(z) + x)


def _decoded(part: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(part(x)), part.weight.T)


# Ways to call a linear layer.
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one_by_one": lambda part, x: torch.stack([part(row) for row in x]),
    "kept_one_by_one": lambda part, x: torch.cat([part(x[n : n + 1]) for n in range(len(x))]),
    "parts": _parts_of_batch,
    "siamese": _siamese,
    "outside_in": _drawn_twice,
    "inside_out": _drawn_twice_inside,
    "relaxed": _relaxed,
    "implicit": _implicit,
    "decoded": _decoded,
    "mapped": lambda part, x: torch.vmap(part)(x),
    "batch_last": lambda part, x: part(x.movedim(0, -2)).movedim(-2, 0),
    "merged": lambda part, x: part(x.reshape(-1, x.shape[-1])).reshape(x.shape),
    "half_detached": lambda part, x: part(x.detach()) + part(x).detach(),
    "reversed": lambda part, x: part(x.flip(0)).flip(0),
    "sorted": lambda part, x: part(x[(o := x.detach().flatten(1).sum(1).argsort())])[o.argsort()],
    "squeezed": lambda part, x: part(x[None])[0],
    "unsqueezed": lambda part, x: part(x.unsqueeze(1)).squeeze(1),
    "aside": lambda part, x: part(x) + 0 * part(torch.ones_like(x)),
}


def _draw_call(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 1, 2)
    return {"name": random.choice(sorted(CALLS))}


module(
    "Called",
    lambda s, shapes: nn.Linear(shapes[0][-1], shapes[0][-1]),
    _draw_call,
    lambda part, s, x: CALLS[s["name"]](part, x),
    weight=8,
    traits="trap",
)
