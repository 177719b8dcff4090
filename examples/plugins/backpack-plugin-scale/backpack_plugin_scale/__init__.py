"""A module that scales its input, and the rule that makes every extension work for it."""

from __future__ import annotations

import torch
from backpack_core import View
from backpack_products import ParametricRule
from torch import Tensor, nn


class ScaleModule(nn.Module):
    """Multiply by one trained number, ``y = w x``.

    Args:
        weight: The number to start from.
    """

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, input: Tensor) -> Tensor:
        """Scale ``input``, of shape ``[N, *]``."""
        return input * self.weight


class ScaleRule(ParametricRule):
    """``y = w x``: the output is linear in the input, and in the weight."""

    module_types = (ScaleModule,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.parameter("weight")  # [V, N, *]

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return (mat * view.input).flatten(2).sum(2, keepdim=True)  # [V, N, 1]
