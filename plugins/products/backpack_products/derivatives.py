"""What follows from a layer's rule besides transposed Jacobians."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.contract.rules import LayerRule, expect
from backpack_core.record.untouched import ask
from backpack_core.record.view import View
from backpack_products.transposition import transpose


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
    if rule.hessian_is_zero:
        return torch.zeros_like(mat)
    expect(view, rule, "_second_derivative_mat_prod is given", mat, view.input_shape)
    method = "_second_derivative_mat_prod"
    product: Tensor = ask(view, rule, method, view, grad_output, mat)
    expect(view, rule, "_second_derivative_mat_prod returned", product, view.input_shape, len(mat))
    return product
