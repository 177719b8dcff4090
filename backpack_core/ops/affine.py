"""Fast versions for affine rules: contractions that never form ``[V, N, *θ]``."""

from __future__ import annotations

from torch import Tensor

from backpack_core import contractions
from backpack_core.calls import ModuleCall
from backpack_core.ops import generic
from backpack_core.ops.generic import MaterializedRule
from backpack_core.rules import AffinePairsRule


def _formed(call: ModuleCall, name: str, mat: Tensor, out: Tensor) -> MaterializedRule | None:
    """``M``, if it is there and reading it is cheaper than a contraction of the factors."""
    product = generic.formed(call, name, mat) if out.shape[2] > 1 else None
    return None if product is None else MaterializedRule(product)


@generic.square_sum.register
def square_sum_affine(rule: AffinePairsRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """By :func:`contractions.square_sum`."""
    out, inp = rule.affine_pair(call, name, mat)
    if product := _formed(call, name, mat, out):
        return generic.square_sum(product, call, name, mat)
    if inp is None:
        return rule.from_matrix(call, name, out.sum(2).square().sum((0, 1)))
    squares = generic.known(generic.per_sample_square_sum, call, name, mat)
    if squares is not None and out.shape[2] > 1:
        return squares.sum(0)
    return rule.from_matrix(call, name, contractions.square_sum(out, inp))


@generic.per_sample_square_sum.register
def per_sample_square_sum_affine(
    rule: AffinePairsRule, call: ModuleCall, name: str, mat: Tensor
) -> Tensor:
    """By :func:`contractions.per_sample_square_sum`."""
    out, inp = rule.affine_pair(call, name, mat)
    if product := _formed(call, name, mat, out):
        return generic.per_sample_square_sum(product, call, name, mat)
    if inp is None:
        return rule.from_matrix(call, name, out.sum(2).square().sum(0))
    return rule.from_matrix(call, name, contractions.per_sample_square_sum(out, inp))


@generic.squared_norm.register
def squared_norm_affine(rule: AffinePairsRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """By :func:`contractions.squared_norm`."""
    out, inp = rule.affine_pair(call, name, mat)
    if product := _formed(call, name, mat, out):
        return generic.squared_norm(product, call, name, mat)
    if inp is None:
        return out.sum(2).flatten(2).square().sum(2)
    return contractions.squared_norm(out, inp)


@generic.per_sample_sum.register
def per_sample_sum_affine(
    rule: AffinePairsRule, call: ModuleCall, name: str, mat: Tensor
) -> Tensor:
    """By :func:`contractions.sums`."""
    out, inp = rule.affine_pair(call, name, mat)
    if product := _formed(call, name, mat, out):
        return generic.per_sample_sum(product, call, name, mat)
    total = out.sum((1, 2)) if inp is None else contractions.sums(out, inp)
    return rule.from_matrix(call, name, total)


@generic.moments.register
def moments_affine(
    rule: AffinePairsRule, call: ModuleCall, name: str, mat: Tensor
) -> tuple[Tensor, Tensor]:
    """By :func:`contractions.moments`."""
    out, inp = rule.affine_pair(call, name, mat)
    if inp is None or _formed(call, name, mat, out):
        total = generic.per_sample_sum(rule, call, name, mat)
        return total, generic.square_sum(rule, call, name, mat)
    total, squares = contractions.moments(out, inp)
    return rule.from_matrix(call, name, total), rule.from_matrix(call, name, squares)


@generic.gram.register
def gram_affine(rule: AffinePairsRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """By :func:`contractions.gram`."""
    out, inp = rule.affine_pair(call, name, mat)
    if product := _formed(call, name, mat, out):
        return generic.gram(product, call, name, mat)
    if inp is None:
        flat = out.sum(2).flatten(2).flatten(0, 1)
        return (flat @ flat.T).reshape(2 * mat.shape[:2])
    return contractions.gram(out, inp)
