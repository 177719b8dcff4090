"""Rule of ``nn.LocalResponseNorm``."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor
from torch.nn import LocalResponseNorm

from backpack_core.calls import ModuleCall
from backpack_core.rules import LayerRule
from backpack_layers.arguments import once
from backpack_layers.linear_map import over_columns


class LocalResponseNormRule(LayerRule):
    """``x d^(-β)`` with ``d = k + α A x²``, where ``A`` is the mean over neighbouring channels."""

    module_types = (LocalResponseNorm,)

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        norm, x, d = _norm(call), call.input, _denominator(call)
        power = d**-norm.beta
        spread = _spread(call, mat * (x * power / d))
        return mat * power - 2 * norm.alpha * norm.beta * x * spread

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        norm, x, d = _norm(call), call.input, _denominator(call)
        power = d**-norm.beta
        change = over_columns(lambda m: _neighbours(call, m), mat * x)
        return mat * power - 2 * norm.alpha * norm.beta * (x * power / d) * change

    def _second_derivative_mat_prod(
        self, call: ModuleCall, grad_output: Tensor, mat: Tensor
    ) -> Tensor:
        norm, x, d = _norm(call), call.input, _denominator(call)
        factor = grad_output * d ** (-norm.beta - 1)
        change = 2 * norm.alpha * over_columns(lambda m: _neighbours(call, m), mat * x)
        inner = factor * mat - (norm.beta + 1) * factor * x / d * change
        spread = mat * _spread(call, (factor * x)[None]) + x * _spread(call, inner)
        return -norm.beta * (factor * change + 2 * norm.alpha * spread)


def _norm(call: ModuleCall) -> LocalResponseNorm:
    return cast(LocalResponseNorm, call.module)


def _denominator(call: ModuleCall) -> Tensor:
    norm, x = _norm(call), call.input
    return once(call, "denominator", lambda: norm.k + norm.alpha * _neighbours(call, x**2))


def _neighbours(call: ModuleCall, x: Tensor, transpose: bool = False) -> Tensor:
    """Mean over neighbouring channels; a window of even size is not symmetric."""
    size = _norm(call).size
    before, after = size // 2, (size - 1) // 2
    if transpose:
        before, after = after, before
    padded = F.pad(x.flatten(2).unsqueeze(1), (0, 0, before, after))
    return F.avg_pool2d(padded, (size, 1), stride=1).reshape(x.shape)


def _spread(call: ModuleCall, mat: Tensor) -> Tensor:
    return over_columns(lambda m: _neighbours(call, m, transpose=True), mat)
