"""Diagonals of the Hessian."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from backpack_core import (
    AffineRule,
    LayerRule,
    ModuleCall,
    ParametricRule,
    SecondOrderExtension,
    ops,
)
from backpack_core.errors import UnsupportedError
from backpack_core.extension import FailMode, as_subsampling
from backpack_secondorder.hessian import Hessian
from backpack_secondorder.signed_sqrt import Residual, SignedSqrt


class HessianExtension(SecondOrderExtension):
    """What reads off the Hessian at the output of a layer that is linear in its parameters."""

    shared_parameters = False
    residual: Residual = "exact"

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; default: all. The scale stays that of the
                whole batch.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
        """
        propagator = SignedSqrt(self.residual, as_subsampling(subsampling))
        super().__init__(propagator, savefield, fail_mode)


class DiagHessian(HessianExtension):
    """Diagonal of the Hessian, exact.

    Stored in ``diag_h``, shape ``[*θ]``: ``∂²ℓ/∂θ_i²``, entry by entry, with the scale of the loss
    (``1/N`` for a mean). Every nonlinear module adds as many columns as it has inputs, so this is
    for small nets. Nonlinear modules need a rule with second derivatives, parameters must enter
    linearly (as they do in affine and normalisation layers) and once. Dangel et al. (2020),
    BackPACK, appendix A.3.
    """

    savefield = "diag_h"

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Hessian) -> Tensor:
        """``Σ_n diag(J_θᵀ H_n J_θ)``."""
        return read_diagonal(rule, call, name, mat)


class BatchDiagHessian(HessianExtension):
    """Diagonal of each sample's Hessian, exact.

    Stored in ``diag_h_batch``, shape ``[N, *θ]``: as :class:`DiagHessian`, for the loss of each
    sample (with its ``1/N`` for a mean), so that the sum over ``n`` is ``diag_h``.
    """

    savefield = "diag_h_batch"

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Hessian) -> Tensor:
        """``diag(J_θᵀ H_n J_θ)``."""
        return read_diagonal(rule, call, name, mat, per_sample=True)


def read_diagonal(
    rule: LayerRule, call: ModuleCall, name: str, hessian: Hessian, per_sample: bool = False
) -> Tensor:
    """``Σ_n diag(J_θᵀ H_n J_θ)``, or each summand.

    Args:
        rule: How the module differentiates.
        call: The forward execution.
        name: Name of the parameter ``θ``.
        hessian: ``H`` at the call's output.
        per_sample: Leave out the sum over samples.

    Returns:
        Shape ``[*θ]``, or ``[N, *θ]`` for each sample.
    """
    require_linear(rule, call, name)
    hessian = _local(rule, call, hessian)
    squares = ops.per_sample_square_sum if per_sample else ops.square_sum
    parts = [
        squares(rule, call, name, mat)
        if signs is None
        else ops.signed_square_sum(rule, call, name, mat, signs, per_sample)
        for mat, signs in hessian.signed_columns()
    ]
    if hessian.diagonal is not None:
        parts.append(ops.diagonal_square_sum(rule, call, name, hessian.diagonal, per_sample))
    return sum(parts[1:], parts[0])


def _local(rule: LayerRule, call: ModuleCall, hessian: Hessian) -> Hessian:
    """Columns and a diagonal; without shared positions, a diagonal for all but the columns."""
    if hessian.spread is None and hessian.block is None:
        return hessian
    column = torch.empty(1, *call.output_shape)
    if isinstance(rule, AffineRule) and rule.affine_output(call, column).shape[2] == 1:
        return Hessian(hessian.columns, hessian.own_diagonal())
    blocks = replace(hessian, diagonal=None).as_columns()
    return replace(blocks, diagonal=hessian.diagonal)


def require_linear(rule: LayerRule, call: ModuleCall, name: str) -> None:
    """Raise unless the layer is known to be linear in the parameter.

    Raises:
        UnsupportedError: ``∂²f/∂θ²`` is not known to vanish.
    """
    if not (isinstance(rule, ParametricRule) and name in rule.linear_in_params):
        raise UnsupportedError(
            f"The Hessian in {name!r} of {call.path} needs the layer's second derivative in that "
            f"parameter, which {type(rule).__name__} does not declare to vanish: write a layer "
            "rule that names it in linear_in_params, freeze the parameter, or use the generalised "
            "Gauss-Newton matrix (DiagGGNExact, GGNMP)."
        )
