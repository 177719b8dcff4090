"""Fast versions for affine rules: contractions that never form ``[V, N, *θ]``. Imports rules only."""

from __future__ import annotations

from torch import Tensor

from backpack_core import contractions
from backpack_core.calls import ModuleCall
from backpack_core.ops import generic
from backpack_core.rules import AffineRule


def _bias(rule: AffineRule, call: ModuleCall, mat: Tensor) -> Tensor:
    """``M`` of the bias, ``[V, N, G·O]``: never larger than ``mat``."""
    return generic.per_sample(rule, call, "bias", mat)


@generic.square_sum.register
def square_sum_affine(rule: AffineRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """By :func:`contractions.square_sum`."""
    existing = generic.formed(call, name, mat)
    if existing is not None or name == "bias":
        product = _bias(rule, call, mat) if existing is None else existing
        return product.square().sum((0, 1))
    out, inp = rule.affine_output(call, mat), rule.affine_input(call)
    return rule.weight_from_matrix(call, contractions.square_sum(out, inp))


@generic.per_sample_square_sum.register
def per_sample_square_sum_affine(
    rule: AffineRule, call: ModuleCall, name: str, mat: Tensor
) -> Tensor:
    """By :func:`contractions.per_sample_square_sum`."""
    existing = generic.formed(call, name, mat)
    if existing is not None or name == "bias":
        product = _bias(rule, call, mat) if existing is None else existing
        return product.square().sum(0)
    out, inp = rule.affine_output(call, mat), rule.affine_input(call)
    return rule.weight_from_matrix(call, contractions.per_sample_square_sum(out, inp))


@generic.squared_norm.register
def squared_norm_affine(rule: AffineRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
    """By :func:`contractions.squared_norm`."""
    existing = generic.formed(call, name, mat)
    if existing is not None or name == "bias":
        product = _bias(rule, call, mat) if existing is None else existing
        return product.flatten(2).square().sum(2)
    out, inp = rule.affine_output(call, mat), rule.affine_input(call)
    return contractions.squared_norm(out, inp)
