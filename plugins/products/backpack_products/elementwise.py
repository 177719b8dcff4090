"""The base of rules of elementwise activations."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from backpack_core.contract.bases import base
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_products.derivatives import SecondOrderRule


@base
class ElementwiseRule(SecondOrderRule):
    """The rule of an activation ``y_i = φ(x_i)`` without parameters.

    A module that works in place overwrites ``view.input``. A formula in terms of ``view.output``
    works for such modules, too.

    To write:
        ``derivative(view)`` and, unless ``hessian_is_zero``, ``second_derivative(view)``: tensors
        of the shape of the input, ``[N, *]``.
    """

    hessian_is_diagonal = True

    @abstractmethod
    def derivative(self, view: View) -> Tensor:
        """``φ'(x)``, of the shape of the input ``[N, *]``."""

    def second_derivative(self, view: View) -> Tensor:
        """``φ''(x)``, of the shape of the input ``[N, *]``. Default: zero, if declared so."""
        if self.hessian_is_zero:
            return torch.zeros_like(view.output)
        raise UnsupportedError(
            f"{type(self).__name__} has no second derivative, but {view.path} needs one here. Use "
            "DiagHMP, HMP or the generalised Gauss-Newton matrix (DiagGGNExact, GGNMP), or "
            "implement second_derivative(view) in the rule."
        )

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * self.derivative(view)

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        return mat * (self.second_derivative(view) * grad_output)


def has_second_derivative(rule: LayerRule) -> bool:
    """Whether a rule has its second derivative in the input, by its class and declarations."""
    if not isinstance(rule, SecondOrderRule) or rule.hessian_is_zero:
        return isinstance(rule, SecondOrderRule)
    if isinstance(rule, ElementwiseRule):
        return type(rule).second_derivative is not ElementwiseRule.second_derivative
    its = type(rule)._second_derivative_mat_prod
    return its is not SecondOrderRule._second_derivative_mat_prod
