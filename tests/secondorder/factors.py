"""What Kronecker factors should be, from what each module receives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import Problem

SAMPLES, SAMPLED_RTOL = 40_000, 0.03


def inputs_of(problem: Problem) -> dict[nn.Module, Tensor]:
    """What each module receives, by a plain forward pass."""
    found: dict[nn.Module, Tensor] = {}
    handles = [
        m.register_forward_pre_hook(lambda m, args: found.update({m: args[0].detach().clone()}))
        for m in problem.model.modules()
    ]
    problem.model(*problem.inputs)
    for handle in handles:
        handle.remove()
    return found


def covariance(module: nn.Module, x: Tensor) -> Tensor:
    """``1/N Σ_n Σ_s x xᵀ`` of what the weight multiplies, from torch's own unfold."""
    if isinstance(module, nn.Conv2d):
        rows = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    elif isinstance(module, nn.ConvTranspose1d):
        # Column (c, k) of the map from weights to outputs, with the weight as a unit vector.
        size = module.in_channels * module.kernel_size[0]
        units = torch.eye(size).reshape(size, module.in_channels, 1, -1)
        outs = [F.conv_transpose1d(x, unit, stride=module.stride) for unit in units]
        rows = torch.stack([out.flatten(1) for out in outs], 1)
    else:
        rows = x.reshape(len(x), -1, x.shape[-1]).mT
    return torch.einsum("nis,njs->ij", rows, rows) / len(x)


def layers(problem: Problem) -> list[Any]:
    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose1d)
    return [m for m in problem.model.modules() if isinstance(m, kinds)]
