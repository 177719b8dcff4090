"""Operations that few models use: transforms, scans, sorting, folding, solving, complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.nets.kinds import Shapes, axes, function, need
from tests.nets.own_functions import Separate


def _order(x: Tensor, axis: int) -> Tensor:
    return x.detach().sin().argsort(axis)


def _filtered(x: Tensor, axis: int) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=axis)
    gains = torch.arange(1.0, 1 + spectrum.shape[axis]).view(-1, *[1] * (x.dim() - axis - 1))
    return torch.fft.irfft(spectrum * torch.polar(gains, gains), n=x.shape[axis], dim=axis)


def _reduced(x: Tensor, axis: int, how: str) -> Tensor:
    return x + torch.zeros_like(x).scatter_reduce(
        axis, _order(x, axis) // 2, x.cos(), how, include_self=False
    )


def _written(x: Tensor, axis: int) -> Tensor:
    """A buffer that is filled step by step."""
    found = torch.empty_like(x)
    state = torch.zeros_like(x.select(axis, 0))
    for step in range(x.shape[axis]):
        state = torch.tanh(state + x.select(axis, step))
        found.select(axis, step).copy_(state)
    return found


def _straight_through(x: Tensor, axis: int) -> Tensor:
    hard = F.one_hot(x.detach().argmax(axis), x.shape[axis]).movedim(-1, axis).to(x.dtype)
    soft = x.softmax(axis)
    return hard + soft - soft.detach()


SCANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "filtered": _filtered,
    "spectrum": lambda x, a: (torch.fft.fft(x, dim=a).abs().square() + 1).log(),
    "real_spectrum": lambda x, a: torch.fft.rfft(x, dim=a, norm="ortho").imag + 0.1,
    "analytic": lambda x, a: (torch.complex(x, x.flip(a)) ** 2).real,
    "polar": lambda x, a: torch.polar(x.square() + 0.1, x.roll(1, a)).imag,
    "as_real": lambda x, a: torch.view_as_real(torch.complex(x, x.sin())).flatten(-2),
    "cumprod": lambda x, a: (1 + 0.3 * x).cumprod(a),
    "cummax": lambda x, a: x.cummax(a).values,
    "logcumsumexp": lambda x, a: x.logcumsumexp(a),
    "median": lambda x, a: x - 0.5 * x.median(a, keepdim=True).values,
    "quantile": lambda x, a: x * x.quantile(0.3, a, keepdim=True),
    "topk": lambda x, a: x.topk(2, a).values,
    "largest_kept": lambda x, a: x.masked_fill(x < x.topk(2, a).values.narrow(a, 1, 1), 0.0),
    "sorted_gather": lambda x, a: x.take_along_dim(_order(x, a), a) * x.sort(a).values,
    "scatter": lambda x, a: torch.zeros_like(x).scatter(a, _order(x, a), x.square()),
    "scatter_mean": lambda x, a: _reduced(x, a, "mean"),
    "scatter_largest": lambda x, a: _reduced(x, a, "amax"),
    "index_copy": lambda x, a: x.index_copy(a, torch.tensor([0]), x.narrow(a, 1, 1).sin()),
    "index_fill": lambda x, a: x.index_fill(a, torch.tensor([0]), 0.4),
    "masked_scatter": lambda x, a: x.masked_scatter(x.detach() > -1e9, x.flip(a)),
    "diff": lambda x, a: x.diff(dim=a, prepend=x.narrow(a, 0, 1).square()),
    "unfolded": lambda x, a: x.unfold(a, 2, 1).prod(-1),
    "repeated": lambda x, a: x.repeat_interleave(2, a),
    "variance": lambda x, a: x * x.var(a, keepdim=True),
    "written": _written,
    "straight_through": _straight_through,
    "rounded": lambda x, a: x + ((2 * x).round() / 2 - x).detach(),
    "own_target": lambda x, a: (x - x.detach().roll(1, a)).square(),
    "batch_last": lambda x, a: x.movedim(0, -1).softmax(a - 1).cumsum(a - 1).movedim(-1, 0),
    "moved": lambda x, a: x.swapaxes(0, a).contiguous().sin().swapaxes(0, a) * x,
    "copies": lambda x, a: (x.unsqueeze(a).expand(*[-1] * a, 3, *[-1] * (x.dim() - a)) ** 2).sum(a),
    "separate": lambda x, a: Separate.apply(x),
    "mapped": lambda x, a: torch.vmap(lambda row: row.softmax(a - 1) * row.sum())(x),
    "stacked": lambda x, a: torch.stack([row.cumsum(a - 1) for row in x]),
    "one_by_one": lambda x, a: torch.cat([x[n : n + 1].softmax(a) for n in range(len(x))]),
    "twice": lambda x, a: (y := torch.cat([x, x.roll(1, a)]).tanh())[: len(x)] + y[len(x) :],
}


def _draw_scan(random: Random, shapes: Shapes) -> dict[str, Any]:
    axis = random.randint(1, len(shapes[0]))
    need(shapes[0][axis - 1] > 1)
    return {"name": random.choice(sorted(SCANS)), "axis": axis}


function("scan", lambda s, x: SCANS[s["name"]](x, s["axis"]), _draw_scan, weight=7)


def _gram(x: Tensor) -> Tensor:
    return x.mT @ x + torch.eye(x.shape[-1])


OF_MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "solve": lambda x: torch.linalg.solve(_gram(x), x.mT),
    "inverse": lambda x: torch.linalg.inv(_gram(x)),
    "cholesky": lambda x: torch.linalg.cholesky(_gram(x)),
    "logdet": lambda x: x * torch.logdet(_gram(x))[:, None, None],
    "matrix_exp": lambda x: torch.matrix_exp(0.1 * _gram(x)),
    "power": lambda x: torch.linalg.matrix_power(_gram(x) / 4, 3),
    "trace": lambda x: x * _gram(x).diagonal(0, 1, 2).sum(1)[:, None, None],
    "lower": lambda x: x.tril() - 0.5 * x.triu(1),
    "diagonal": lambda x: torch.diag_embed(x[:, 0]),
    "turned": lambda x: x.rot90(1, (1, 2)),
    "pairs": lambda x: (x[:, :, None] - x[:, None]).square().sum(-1),
    "similarity": lambda x: F.cosine_similarity(x[:, :, None] + 0.1, x[:, None], -1),
    "interpolated": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "pooled": lambda x: F.avg_pool1d(x, 2, 1) * F.max_pool1d(x, 2, 1),
    "tensordot": lambda x: torch.stack([torch.tensordot(row, row, ([1], [1])) for row in x]),
    "baddbmm": lambda x: torch.baddbmm(x, x @ x.mT, x, beta=0.5, alpha=0.3),
    "block": lambda x: torch.stack([torch.block_diag(row[:1], row[:1]) for row in x]),
}


def _draw_of_matrices(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2)
    need(min(shapes[0]) > 1)
    return {"name": random.choice(sorted(OF_MATRICES))}


function("of_matrices", lambda s, x: OF_MATRICES[s["name"]](x), _draw_of_matrices, weight=5)


def _unpooled(x: Tensor) -> Tensor:
    values, where = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, where, 2, output_size=x.shape[2:])


def _sampled(x: Tensor) -> Tensor:
    grid = torch.tanh(torch.stack([x[:, 0], x.flip(1)[:, 0]], -1))
    return F.grid_sample(x, grid, align_corners=False)


OF_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "patches": lambda x: F.unfold(x, 2),
    "folded": lambda x: F.fold(F.unfold(x, 2).tanh(), x.shape[2:], 2),
    "unpooled": _unpooled,
    "sampled": _sampled,
    "shuffled": lambda x: F.pixel_unshuffle(x[..., :2, :2], 2),
    "circular": lambda x: F.pad(x, (1, 0, 0, 1), mode="circular"),
    "reflected": lambda x: F.pad(x, (1, 1, 0, 0), mode="reflect"),
    "bicubic": lambda x: F.interpolate(x, size=(2, 5), mode="bicubic"),
    "spectrum": lambda x: torch.fft.fft2(x).abs().add(0.1).log(),
    "own_kernel": lambda x: F.conv2d(
        x.flatten(0, 1)[None],
        x[..., :2, :2].flatten(0, 1)[:, None],
        groups=x.shape[0] * x.shape[1],
    ).view(len(x), x.shape[1], x.shape[2] - 1, x.shape[3] - 1),
}


def _draw_of_images(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 3)
    need(min(shapes[0][1:]) > 1)
    return {"name": random.choice(sorted(OF_IMAGES))}


function("of_images", lambda s, x: OF_IMAGES[s["name"]](x), _draw_of_images, weight=4)
