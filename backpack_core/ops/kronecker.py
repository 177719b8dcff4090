"""Kronecker factors of a parameter's curvature block. Imports rules and contractions.

For ``y[n, s] = W x[n, s] + b`` with columns ``g[v, n, s]`` at ``y``, the block of ``W`` is the sum over
``v, n`` of the outer product of ``Σ_s g[v, n, s] ⊗ x[n, s]`` with itself. A Kronecker product needs a
statement on how the positions ``s`` are summed, which is :data:`WeightSharing`.
"""

from __future__ import annotations

import weakref
from functools import singledispatch
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from backpack_core.calls import ModuleCall
from backpack_core.errors import UnsupportedError
from backpack_core.kronecker import KroneckerFactors, ParameterOrder
from backpack_core.ops import generic
from backpack_core.rules import AffineRule, LayerRule, ParametricRule

WeightSharing: TypeAlias = Literal["kfc", "expand", "reduce"]

# Columns may come in chunks, but the inputs of a call stay what they are.
_covariances: weakref.WeakKeyDictionary[ModuleCall, dict[Any, Tensor]] = weakref.WeakKeyDictionary()


@singledispatch
def kronecker_factors(
    rule: LayerRule, call: ModuleCall, name: str, mat: Tensor, sharing: WeightSharing = "kfc"
) -> KroneckerFactors:
    """Factors whose Kronecker product approximates ``Σ_v Σ_n M[v, n] M[v, n]ᵀ``.

    A vector that the layer is linear in (the scale of a normalisation, say) is small enough for its
    block: the only factor, exact.

    Args:
        rule: How the module differentiates.
        call: The forward execution.
        name: Name of the parameter ``θ``.
        mat: Columns at the output. Shape ``[V, N, *out]``.
        sharing: How positions that share the weight are treated; see :class:`AffineRule` and
            :func:`input_covariance`.

    Raises:
        UnsupportedError: The layer declares no structure.
    """
    if isinstance(rule, ParametricRule) and name in rule.linear_in_params:
        shape = call.parameter(name).shape
        if len(shape) == 1:
            return KroneckerFactors([block(rule, call, name, mat)], ParameterOrder(shape))
    raise UnsupportedError(
        f"Kronecker structure is needed for the parameter {name!r} of {call.path}, and "
        f"{type(rule).__name__} declares none: derive the rule from AffineRule, freeze the "
        "parameter, or use DiagGGNExact or DiagGGNMC, which need no structure."
    )


@kronecker_factors.register
def kronecker_factors_affine(
    rule: AffineRule, call: ModuleCall, name: str, mat: Tensor, sharing: WeightSharing = "kfc"
) -> KroneckerFactors:
    """``[B, A]`` for the weight, the exact block for the bias."""
    shape = call.parameter(name).shape
    if name == "bias":
        return KroneckerFactors([block(rule, call, name, mat)], ParameterOrder(shape))
    factors = [output_covariance(rule, call, mat, sharing), input_covariance(rule, call, sharing)]
    return KroneckerFactors(factors, weight_order(rule, call))


def block(rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``Σ_v Σ_n M[v, n] M[v, n]ᵀ`` itself. Shape ``[P, P]``."""
    total: Tensor | None = None
    for _, _, part in generic.chunks(rule, call, name, mat):
        rows = part.flatten(2).flatten(0, 1)
        product = rows.T @ rows
        total = product if total is None else total + product
    assert total is not None
    return total


def output_covariance(
    rule: AffineRule, call: ModuleCall, mat: Tensor, sharing: WeightSharing = "kfc"
) -> Tensor:
    """``B``: ``Σ_v Σ_n g gᵀ`` with ``g`` summed over positions, or for each position if expanded.

    Returns:
        Shape ``[O, O]``, or ``[G, O, O]`` for a layer with groups.
    """
    out = rule.affine_output(call, mat)  # [V, N, S, G, O]
    rows = out.flatten(0, 2) if sharing == "expand" else out.sum(2).flatten(0, 1)
    return _gram(rows)


def input_covariance(
    rule: AffineRule, call: ModuleCall, sharing: WeightSharing = "kfc"
) -> Tensor:
    """``A``, an average over the ``N`` samples that the call shows.

    ``"kfc"``: ``1/N Σ_n Σ_s x xᵀ`` (Grosse and Martens, 2016, eq. 32); ``"expand"``: ``1/(N S)
    Σ_n Σ_s x xᵀ``; ``"reduce"``: ``1/N Σ_n x̄ x̄ᵀ`` with the mean ``x̄`` over positions (Eschenhagen et
    al., 2023, eq. 19 and 22).

    Returns:
        Shape ``[I, I]``, or ``[G, I, I]`` for a layer with groups.
    """
    known = {} if torch.is_grad_enabled() else _covariances.setdefault(call.full, {})
    key = (sharing, call.indices, call.dtype)
    if key not in known:
        inp = rule.affine_input(call)  # [N, S, G, I]
        rows = inp.mean(1) if sharing == "reduce" else inp.flatten(0, 1)
        count = len(rows) if sharing == "expand" else call.batch_size
        known[key] = _gram(rows) / count
    return known[key]


def weight_order(rule: AffineRule, call: ModuleCall) -> ParameterOrder:
    """How the rows of ``B ⊗ A`` number the entries of the weight."""
    weight = call.parameter("weight")
    if type(rule).weight_to_matrix is AffineRule.weight_to_matrix:
        return ParameterOrder(weight.shape)
    positions = torch.arange(weight.numel(), device=weight.device).reshape(weight.shape)
    return ParameterOrder(weight.shape, rule.weight_to_matrix(call, positions).flatten())


def _gram(rows: Tensor) -> Tensor:
    """``Σ_m x_m x_mᵀ`` for ``[M, G, D]``: ``[D, D]``, or ``[G, D, D]`` for several groups."""
    if rows.shape[1] == 1:
        flat = rows.squeeze(1)
        return flat.T @ flat
    grouped = rows.transpose(0, 1)
    return grouped.mT @ grouped
