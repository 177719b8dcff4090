"""Rule of ``nn.LocalResponseNorm``."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor
from torch.nn import LocalResponseNorm

from backpack_core.record.view import View
from backpack_layers.linear_map import over_columns
from backpack_products.derivatives import SecondOrderRule


class LocalResponseNormRule(SecondOrderRule):
    """``x d^(-β)`` with ``d = k + α A x²``, where ``A`` is the mean over neighbouring channels."""

    module_types = (LocalResponseNorm,)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        norm, x, d = _norm(view), view.input, _denominator(view)
        power = d**-norm.beta
        change_of_sum = _transposed(view, mat * (x * power / d))
        return mat * power - 2 * norm.alpha * norm.beta * x * change_of_sum

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        norm, x, d = _norm(view), view.input, _denominator(view)
        factor = grad_output * d ** (-norm.beta - 1)
        change = 2 * norm.alpha * over_columns(lambda m: _neighbours(view, m), mat * x)
        inner = factor * mat - (norm.beta + 1) * factor * x / d * change
        change_of_sum = mat * _transposed(view, (factor * x)[None]) + x * _transposed(view, inner)
        return -norm.beta * (factor * change + 2 * norm.alpha * change_of_sum)


def _norm(view: View) -> LocalResponseNorm:
    return cast(LocalResponseNorm, view.module)


def _denominator(view: View) -> Tensor:
    norm, x = _norm(view), view.input
    return view.once("denominator", lambda: norm.k + norm.alpha * _neighbours(view, x**2))


def _neighbours(view: View, x: Tensor, transpose: bool = False) -> Tensor:
    """Mean over neighbouring channels; a window of even size is not symmetric."""
    size = _norm(view).size
    before, after = size // 2, (size - 1) // 2
    if transpose:
        before, after = after, before
    padded = F.pad(x.flatten(2).unsqueeze(1), (0, 0, before, after))
    return F.avg_pool2d(padded, (size, 1), stride=1).reshape(x.shape)


def _transposed(view: View, mat: Tensor) -> Tensor:
    return over_columns(lambda m: _neighbours(view, m, transpose=True), mat)
