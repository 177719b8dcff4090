"""What a layer's rule says of second derivatives, and what follows from transposed Jacobians."""

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
    """A layer ``x ↦ f(x)`` that says what it knows of second derivatives in its input.

    Class attributes:
        hessian_is_zero: ``∂²f/∂x²`` vanishes (almost everywhere), for several inputs that of all
            together: a product of two has another.
        hessian_is_diagonal: ``∂²f_o/∂x_i∂x_j = 0`` unless ``i = j = o``.
        jacobian_is_constant: ``∂f/∂x`` is one matrix for all samples and all values of the input.

    A property that is not declared is assumed absent. The conformance kit checks each of them.

    To write:
        ``_jac_t_mat_prod(view, mat)``, as for every :class:`LayerRule`. Optional, for a layer whose
        Hessian is not zero: ``_second_derivative_mat_prod(view, grad_output, mat)``.
    """

    hessian_is_zero: ClassVar[bool] = False
    hessian_is_diagonal: ClassVar[bool] = False
    jacobian_is_constant: ClassVar[bool] = False

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        """``[V, N, *in] → [V, N, *in]``; the gradient at the output times ``∂²f/∂x²``."""
        raise _has_none(self, view)


def second_order(rule: LayerRule) -> SecondOrderRule:
    """A rule, for what it declares; one of another base declares what the base class does."""
    declaring: Any = rule if isinstance(rule, SecondOrderRule) else SecondOrderRule
    of_rule: SecondOrderRule = declaring
    return of_rule


def _has_none(rule: LayerRule, view: View) -> UnsupportedError:
    is_ready = isinstance(rule, SecondOrderRule)
    first = "" if is_ready else "derive it from backpack_products.SecondOrderRule, and "
    return UnsupportedError(
        f"{type(rule).__name__} has no second derivative, which {view.path} needs here: {first}"
        "implement _second_derivative_mat_prod, or declare hessian_is_zero if it is."
    )


def jac_mat_prod(rule: LayerRule, view: View, mat: Tensor) -> Tensor:
    """Input Jacobian, applied to every column of every sample; found by transposition.

    Args:
        rule: The layer's rule.
        view: The forward execution.
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
    """Second derivative contracted with a gradient, applied to columns.

    Args:
        rule: The layer's rule.
        view: The forward execution.
        grad_output: Gradient at the output. Shape ``[N, *out]``.
        mat: Columns at the first input. Shape ``[V, N, *in]``.

    Returns:
        ``Σ_o grad_output_o ∂²f_o/∂x² mat``. Shape ``[V, N, *in]``.

    Raises:
        UnsupportedError: The rule knows no second derivative.
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
