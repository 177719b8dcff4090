"""Kronecker factors of a parameter's curvature block. Imports rules and contractions.

For ``y[n, s] = W x[n, s] + b`` with columns ``g[v, n, s]`` at ``y``, the block of ``W`` is the sum
over ``v, n`` of the outer product of ``Σ_s g[v, n, s] ⊗ x[n, s]`` with itself. A Kronecker product
needs a statement on how the positions ``s`` are summed, which is :data:`WeightSharing`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from backpack_core import contractions
from backpack_core.calls import ModuleCall
from backpack_core.errors import UnsupportedError
from backpack_core.kronecker import KroneckerEigenbasis, KroneckerFactors, ParameterOrder
from backpack_core.ops import generic
from backpack_core.rules import AffinePairsRule, AffineRule, LayerRule, ParametricRule

WeightSharing: TypeAlias = Literal["kfc", "expand", "reduce"]


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
    rule: AffinePairsRule, call: ModuleCall, name: str, mat: Tensor, sharing: WeightSharing = "kfc"
) -> KroneckerFactors:
    """``[B, A]`` for a weight, the exact block for a bias."""
    shape = call.parameter(name).shape
    out, inp = rule.affine_pair(call, name, mat)
    if inp is None and not _is_ordered(rule, call, name, out):
        return KroneckerFactors([block(rule, call, name, mat)], ParameterOrder(shape))
    if sharing == "expand" and inp is not None:
        outer = output_covariance(out, sharing)
    else:
        outer = _of_summed_positions(rule, call, mat, out)
    if inp is None:
        return KroneckerFactors([outer], ParameterOrder(shape))
    factors = [outer, input_covariance(call, name, inp, sharing)]
    sizes = (out.shape[3], out.shape[4], inp.shape[3])
    return KroneckerFactors(factors, weight_order(rule, call, name, sizes))


@singledispatch
def corrected_eigenbasis(
    rule: LayerRule, call: ModuleCall, name: str, mat: Tensor, sharing: WeightSharing = "kfc"
) -> KroneckerEigenbasis:
    """Eigenvectors ``Q`` of the Kronecker product, with ``diag(Qᵀ G Q)`` as eigenvalues.

    ``G = Σ_v Σ_n M[v, n] M[v, n]ᵀ`` is the block that :func:`kronecker_factors` approximates, so
    this is the best approximation with these eigenvectors (George et al., 2018, arXiv:1806.03884).
    Arguments as there.
    """
    basis = kronecker_factors(rule, call, name, mat, sharing).eigenbasis()
    if len(basis.vectors) == 1:
        return basis  # of the block itself
    total: Tensor | None = None
    for _, _, part in generic.chunks(rule, call, name, mat):
        rotated = basis.rotate(part.flatten(0, 1)).square().sum(0)
        total = rotated if total is None else total + rotated
    assert total is not None
    return basis.with_values(total.reshape(basis.values.shape))


@corrected_eigenbasis.register
def corrected_eigenbasis_affine(
    rule: AffinePairsRule, call: ModuleCall, name: str, mat: Tensor, sharing: WeightSharing = "kfc"
) -> KroneckerEigenbasis:
    """By :func:`contractions.square_sum` of rotated columns and inputs."""
    basis = kronecker_factors(rule, call, name, mat, sharing).eigenbasis()
    if len(basis.vectors) == 1:
        return basis
    out, inp = rule.affine_pair(call, name, mat)
    assert inp is not None
    outer, inner = basis.vectors
    values = contractions.square_sum(_rotate(out, outer), RotatedRows(inp, inner))
    return basis.with_values(values.reshape(basis.values.shape))


class RotatedRows:
    """Inputs ``[N, S, G, I]`` times ``[I, I]`` or ``[G, I, I]``, for some samples at a time."""

    def __init__(self, inp: contractions.Rows, matrix: Tensor) -> None:
        """Store both."""
        self._inp, self._matrix = inp, matrix
        self.shape = inp.shape

    def __getitem__(self, rows: slice) -> Tensor:
        """The rotated inputs of some samples."""
        return _rotate(self._inp[rows], self._matrix)


def _rotate(rows: Tensor, matrix: Tensor) -> Tensor:
    """``[..., G, D]`` times ``[D, D]`` or ``[G, D, D]``."""
    if matrix.dim() == 2:
        return rows @ matrix
    return (rows.unsqueeze(-2) @ matrix).squeeze(-2)


def block(rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """``Σ_v Σ_n M[v, n] M[v, n]ᵀ`` itself. Shape ``[P, P]``."""
    total: Tensor | None = None
    for _, _, part in generic.chunks(rule, call, name, mat):
        rows = part.flatten(2).flatten(0, 1)
        product = rows.T @ rows
        total = product if total is None else total + product
    assert total is not None
    return total


def output_covariance(out: Tensor, sharing: WeightSharing = "kfc") -> Tensor:
    """``B``: ``Σ_v Σ_n g gᵀ`` with ``g`` summed over positions, or for each position if expanded.

    Args:
        out: Columns in affine form. Shape ``[V, N, S, G, O]``.
        sharing: How positions are treated.

    Returns:
        Shape ``[O, O]``, or ``[G, O, O]`` for a layer with groups.
    """
    rows = out.flatten(0, 2) if sharing == "expand" else out.sum(2).flatten(0, 1)
    return _without_groups(contractions.outer(rows))


def _is_ordered(rule: AffinePairsRule, call: ModuleCall, name: str, out: Tensor) -> bool:
    """Whether a bias has one group, and is stored in the order of the outputs."""
    groups, size = out.shape[3:]
    if groups > 1 or type(rule).from_matrix is AffinePairsRule.from_matrix:
        return groups == 1
    order = torch.arange(size).unsqueeze(0)
    return bool(torch.equal(rule.from_matrix(call, name, order).flatten(), order[0]))


def _of_summed_positions(
    rule: AffinePairsRule, call: ModuleCall, mat: Tensor, out: Tensor
) -> Tensor:
    """:func:`output_covariance`, once for the weight and the bias of an affine layer."""
    if not isinstance(rule, AffineRule):  # each parameter has its own place
        return output_covariance(out)
    key = ("outer", id(mat))
    if key in call.memo:
        again: Tensor = call.memo[key][0].clone()  # each factor is its user's own
        return again
    call.memo[key] = (output_covariance(out), mat)
    factor: Tensor = call.memo[key][0]
    return factor


def input_covariance(
    call: ModuleCall, name: str, inp: contractions.Rows, sharing: WeightSharing = "kfc"
) -> Tensor:
    """``A``, an average over the ``N`` samples that the call shows.

    ``"kfc"``: ``1/N Σ_n Σ_s x xᵀ`` (Grosse and Martens, 2016, eq. 32); ``"expand"``: ``1/(N S)
    Σ_n Σ_s x xᵀ``; ``"reduce"``: ``1/N Σ_n x̄ x̄ᵀ`` with the mean ``x̄`` over positions (Eschenhagen
    et al., 2023, eq. 19 and 22).

    Args:
        call: The forward execution.
        name: Name of the weight.
        inp: What the weight multiplies. Shape ``[N, S, G, I]``.
        sharing: How positions are treated.

    Returns:
        Shape ``[I, I]``, or ``[G, I, I]`` for a layer with groups.
    """
    # Columns may come in chunks, but the inputs of a call stay what they are.
    known = call.full.constants
    key = ("covariance", name, sharing, call.indices, call.dtype, torch.is_grad_enabled())
    if key in known:
        again: Tensor = known[key].clone()  # each extension's factors are its user's own
        return again
    samples, positions = inp.shape[:2]
    count = samples * positions if sharing == "expand" else samples
    itemsize = call.parameter(name).element_size()
    total = contractions.outer_sum(inp, itemsize, 1 / count, mean=sharing == "reduce")
    known[key] = factor = _without_groups(total)
    return factor


def weight_order(
    rule: AffinePairsRule, call: ModuleCall, name: str, sizes: tuple[int, int, int]
) -> ParameterOrder:
    """How the rows of ``B ⊗ A`` number the entries of a weight of ``sizes = (G, O, I)``."""
    weight = call.parameter(name)
    if type(rule).from_matrix is AffinePairsRule.from_matrix:
        return ParameterOrder(weight.shape)
    rows = torch.arange(weight.numel(), device=weight.device).reshape(sizes)
    return ParameterOrder(weight.shape, rule.from_matrix(call, name, rows).flatten().argsort())


def _without_groups(factor: Tensor) -> Tensor:
    """``[1, D, D]`` as ``[D, D]``."""
    return factor.squeeze(0) if len(factor) == 1 else factor
