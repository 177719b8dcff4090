"""Functional operations between modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Cube(torch.autograd.Function):
    """Vectorised backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class NumpyCube(Cube):
    """A backward that vmap cannot see into."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.detach().cpu().numpy() ** 2 * grad.cpu().numpy()).to(grad)


class VmapCube(torch.autograd.Function):
    """A new-style function that declares support for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Halves(torch.autograd.Function):
    """Two outputs, of which one may get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return 2 * first + 3 * second


def scale_in_place(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :2] *= 3.0
    return x


def attention(x: Tensor) -> Tensor:
    tokens = x.reshape(len(x), 2, 2)
    q, k, v = tokens, tokens.roll(1, 2), tokens.flip(1)
    return F.scaled_dot_product_attention(q, k, v).reshape(len(x), 4)


def heads(x: Tensor) -> Tensor:
    """Batch and heads merged, as many attentions do."""
    merged = x.reshape(len(x) * 2, 2, 1)
    return torch.bmm((merged @ merged.mT).softmax(-1), merged).reshape(len(x), 4)


def through_splits(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    c, d = x.split([1, 3], 1)
    e, *_, f = x.unbind(1)
    stacked = torch.stack([e, f], 1)
    return torch.cat([a * b, stacked + d[:, :2], c * d[:, 2:]], 1)[:, :4]


# [N, 4] -> [N, 4]
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": torch.relu,
    "softmax": lambda x: x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm_eval": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "instance_norm": lambda x: F.instance_norm(x.reshape(-1, 1, 4)).reshape(-1, 4),
    "normalize": lambda x: F.normalize(x, dim=1),
    "residual": lambda x: x + torch.sin(x),
    "diamond": lambda x: torch.sin(x) * torch.cos(x) + x,
    "scalar": lambda x: 2.5 * x - 1,
    "broadcast_scale": lambda x: x * x[:, :1],
    "broadcast_mean": lambda x: x - x.mean(1, keepdim=True),
    "broadcast_constant": lambda x: x + torch.arange(4.0),
    "expand": lambda x: x[:, :1].expand(-1, 4) * x,
    "outer": lambda x: (x[:, :, None] * x[:, None, :]).sum(2),
    "einsum": lambda x: torch.einsum("ni,nj->nij", x, x).flatten(1)[:, 3:7],
    "attention": attention,
    "heads": heads,
    "time_first": lambda x: (
        x.reshape(-1, 2, 2).transpose(0, 1).cumsum(0).transpose(0, 1).flatten(1)
    ),
    "splits": through_splits,
    "only_one_part": lambda x: x.chunk(2, 1)[1].repeat(1, 2),
    "max_with_indices": lambda x: x * x.max(1, keepdim=True).values,
    "sort": lambda x: x.sort(1).values,
    "index": lambda x: x[:, [3, 0, 0, 2]],
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "in_place_slice": scale_in_place,
    "in_place_view": lambda x: (x * 1).view(-1).mul_(3.0).view(-1, 4),
    "clone_detach_sum": lambda x: x.clone() + x.detach(),
    "pad": lambda x: F.pad(x, (1, 1))[:, :4],
    "convolution": lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 3), padding=1).flatten(1),
    "max_pool": lambda x: F.max_pool1d(x[:, None], 2, 1, 1)[..., :4].flatten(1),
    "float_and_back": lambda x: x.float().double(),
    "custom_function": Cube.apply,
    "custom_function_numpy": NumpyCube.apply,
    "custom_function_vmap": VmapCube.apply,
    "custom_function_one_output": lambda x: Halves.apply(x)[1],
    "custom_function_two_outputs": lambda x: Halves.apply(x)[1] * Halves.apply(x)[0],
    "complex": lambda x: torch.fft.fft(x).abs(),
    "distances": lambda x: torch.cdist(x[:, :, None], 2 * x[:, :, None] + 1).flatten(1)[:, 3:7],
    "roll_a_number": lambda x: torch.stack([n.roll(1) for n in x.sin().flatten()]).view_as(x),
}
