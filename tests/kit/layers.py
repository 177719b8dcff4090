"""A few layers with right rules, for the kit to pass, and to be broken one at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core import LayerRule, View
from backpack_core.testing import RuleCase
from backpack_products import AffineRule, ElementwiseRule, ParametricRule, SecondOrderRule


class Gain(Module):
    """``y = w ⊙ x``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class GainRule(ParametricRule):
    module_types = (Gain,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.parameter("weight")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return mat * view.input


class Temperature(Module):
    """``y = t x`` with a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.t = Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.t


class TemperatureRule(ParametricRule):
    module_types = (Temperature,)
    params = ("t",)
    linear_in_params = ("t",)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.parameter("t")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return (mat * view.input).flatten(2).sum(2)


class Grouped(Module):
    """``y[n, g] = W[g] x[n, g]`` for two groups: two inputs and two outputs each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(4, 2))
        self.bias = Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("goi,ngi->ngo", self.weight.view(2, 2, 2), x.view(-1, 2, 2))
        return y.flatten(1) + self.bias


class GroupedRule(AffineRule):
    module_types = (Grouped,)

    def affine_input(self, view: View) -> Tensor:
        return view.input.reshape(-1, 1, 2, 2)

    def affine_output(self, view: View, mat: Tensor) -> Tensor:
        return mat.reshape(*mat.shape[:2], 1, 2, 2)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        weight = view.parameter("weight").view(2, 2, 2)
        product = torch.einsum("goi,vngo->vngi", weight, mat.reshape(*mat.shape[:2], 2, 2))
        return product.flatten(2)


class Cube(Module):
    """``y = x³``."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3


class CubeRule(ElementwiseRule):
    module_types = (Cube,)

    def derivative(self, view: View) -> Tensor:
        return 3 * view.input**2

    def second_derivative(self, view: View) -> Tensor:
        return 6 * view.input


class Power(Module):
    """``y = a³ ⊙ b``."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a**3 * b


class PowerRule(SecondOrderRule):
    module_types = (Power,)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        a, b = view.input, view.tensor_input(1)
        return mat * 3 * a**2 * b, mat * a**3

    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        a, b = view.input, view.tensor_input(1)
        return mat * 6 * a * b * grad_output


class Score(Module):
    """``y = wᵀ x``: a number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class ScoreRule(ParametricRule):
    module_types = (Score,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat.unsqueeze(-1) * view.parameter("weight")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return mat.unsqueeze(-1) * view.input


class Doubled(Module):
    """``y = 2 x``."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class SlopeIsANumber(ElementwiseRule):
    module_types = (Doubled,)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        return view.input.new_tensor(2.0)


class Centre(Module):
    """Samples minus their mean: they mix."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CentreRule(SecondOrderRule):
    module_types = (Centre,)
    hessian_is_zero = True

    def mixes_samples(self, view: View) -> bool:
        return True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat - mat.mean(1, keepdim=True)


def case_of(layer: type[Module], rule: type[LayerRule], **options: object) -> RuleCase:
    """A layer on ``[N, 4]`` with a rule of the test's."""
    return RuleCase(layer, lambda n: torch.randn(n, 4), rule=rule, **options)
