"""Second derivatives of layers, and Jacobian products that follow from transposed ones."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from backpack_core.contract.bases import base
from backpack_core.contract.rules import LayerRule, expect
from backpack_core.errors import UnsupportedError
from backpack_core.record.guards import ask
from backpack_core.record.view import View
from backpack_products.transposition import transpose


@base
class SecondOrderRule(LayerRule):
    """The rule of a layer ``x ↦ f(x)`` that declares its second derivative in the input.

    Class attributes:
        hessian_is_zero: ``∂²f/∂x²`` vanishes (almost everywhere). With several inputs, this means
            the Hessian in all inputs together, which a product of two inputs does not have.
        hessian_is_diagonal: ``∂²f_o/∂x_i∂x_j = 0`` unless ``i = j = o``.
        jacobian_is_constant: ``∂f/∂x`` is the same matrix for all samples and all inputs.

    A property that is not declared is assumed absent. The conformance kit checks each of them.

    To write:
        ``_jac_t_mat_prod(view, mat)``, as for every :class:`LayerRule`. Optional, for a layer whose
        Hessian is not zero: ``_second_derivative_mat_prod(view, grad_output, mat)``.
    """

    hessian_is_zero: ClassVar[bool] = False
    hessian_is_diagonal: ClassVar[bool] = False
    jacobian_is_constant: ClassVar[bool] = False

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        """``Σ_o grad_output_o ∂²f_o/∂x² mat``. Shape ``[V, N, *in] → [V, N, *in]``."""
        raise _has_none(self, view)


def second_order(rule: LayerRule) -> SecondOrderRule:
    """The object that holds a rule's declarations; the defaults for rules of another base."""
    declarations: Any = rule if isinstance(rule, SecondOrderRule) else SecondOrderRule
    return declarations  # type: ignore[no-any-return]


def _has_none(rule: LayerRule, view: View) -> UnsupportedError:
    """The error for a rule without a second derivative."""
    is_ready = isinstance(rule, SecondOrderRule)
    first = "" if is_ready else "derive it from backpack_products.SecondOrderRule, and "
    return UnsupportedError(
        f"{type(rule).__name__} has no second derivative, but {view.path} needs one here, since "
        "trained parameters lie before it. Use DiagHMP, HMP or the generalised Gauss-Newton matrix "
        f"(DiagGGNExact, GGNMP), or {first}implement _second_derivative_mat_prod in the rule, or "
        "declare hessian_is_zero if it is."
    )


def jac_mat_prod(rule: LayerRule, view: View, mat: Tensor) -> Tensor:
    """Apply the input Jacobian to columns (a Jacobian-vector product), by transposition.

    Args:
        rule: The layer's rule.
        view: The call.
        mat: Columns at the first input. Shape ``[V, N, *in]``.

    Returns:
        ``J_x mat``. Shape ``[V, N, *out]``.
    """
    expect(view, rule, "jac_mat_prod is given", mat, view.input_shape)

    def first(out: Tensor) -> Tensor:
        product = rule.jac_t_mat_prod(view, out)[0]
        return torch.zeros_like(mat) if product is None else product

    return transpose(first, (len(mat), *view.output_shape), mat)


def second_derivative_mat_prod(
    rule: LayerRule, view: View, grad_output: Tensor, mat: Tensor
) -> Tensor:
    """Contract the second derivative with a gradient, and apply the result to columns.

    Args:
        rule: The layer's rule.
        view: The call.
        grad_output: Gradient at the output. Shape ``[N, *out]``.
        mat: Columns at the first input. Shape ``[V, N, *in]``.

    Returns:
        ``Σ_o grad_output_o ∂²f_o/∂x² mat``. Shape ``[V, N, *in]``.

    Raises:
        UnsupportedError: The rule has no second derivative.
    """
    if second_order(rule).hessian_is_zero:
        return torch.zeros_like(mat)
    if not isinstance(rule, SecondOrderRule):
        raise _has_none(rule, view)
    expect(view, rule, "_second_derivative_mat_prod is given", mat, view.input_shape)
    method = "_second_derivative_mat_prod"
    product: Tensor = ask(view, rule, method, view, grad_output, mat)
    expect(view, rule, "_second_derivative_mat_prod returned", product, view.input_shape, len(mat))
    return product
