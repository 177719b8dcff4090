"""Roots of loss Hessians with a column for every output, like the incumbent's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backpack_core import LossRule, View
from backpack_products import Columns, HessianLossRule
from backpack_products.loss import with_hessian
from backpack_secondorder.propagators import LossSqrt, MixedSqrt


def with_every_column(rule: HessianLossRule, root: Tensor) -> Tensor:
    """A root ``[V, N, *in]`` with columns of zeros up to the number of outputs."""
    missing = root.shape[2:].numel() - len(root)
    if rule.hessian_is_zero or missing <= 0:
        return root
    return torch.cat([root, root.new_zeros(missing, *root.shape[1:])])


@dataclass(frozen=True)
class EveryColumn(LossSqrt):
    """The exact root, with as many columns as the model has outputs."""

    def start(self, rule: LossRule, view: View) -> Columns:
        """Columns of zeros at the end."""
        columns = super().start(rule, view)
        (root,) = columns.blocks
        mat = with_every_column(with_hessian(rule, view), columns.mat)
        return Columns.start(root.name, mat, scale=root.scale)

    def mixing(self) -> LossSqrt:
        """The mixed root with the same start."""
        return MixedEveryColumn(self.samples, self.subsampling, self.tolerance)


@dataclass(frozen=True)
class MixedEveryColumn(EveryColumn, MixedSqrt):
    """The same if columns may be replaced by others."""
