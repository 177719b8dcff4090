"""A quantity, its rules and its readings, written against core alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import (
    Extension,
    LayerRule,
    LossRule,
    Propagator,
    Reading,
    View,
    backpack,
    extend,
)
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import KFRA, BatchGrad, DiagGGNExact, DiagHessian
from backpack_core.testing import temporary_plugin
from backpack_products.loss import loss_gradient
from backpack_products.open_functions import Operation


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain)


class GainRule(LayerRule):
    """Covers a parameter, and says in words of its own how it differentiates there."""

    module_types = (Gain,)
    params = ("gain",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * (1 - view.output.square()) * view.parameter("gain")

    def individual(self, view: View, grad: Tensor) -> Tensor:
        return grad * (1 - view.output.square()) * view.input


class HalfSquares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum() / 2


class HalfSquaresRule(LossRule):
    module_types = (HalfSquares,)


class Individual(Reading):
    """The gradient of each sample, ``[N, *θ]``."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(values.shape[1:])
        self.values = values


class Doubled(Individual):
    """A form of its own."""


asked: list[type] = []


@Operation
def norms(reading: Individual) -> Tensor:
    """Norms ``[N]``."""
    asked.append(type(reading))
    return reading.values.flatten(1).norm(dim=1)


@norms.register
def norms_of_doubled(reading: Doubled) -> Tensor:
    """Those of another form."""
    asked.append(type(reading))
    return 2 * reading.values.flatten(1).norm(dim=1)


@dataclass(frozen=True)
class Gradients(Propagator):
    """Sends the gradient of each sample."""

    form: type[Individual] = Individual
    subsampling: tuple[int, ...] | None = None

    def start(self, rule: LossRule, view: View) -> Tensor:
        return loss_gradient(view)

    def propagate(self, rule: LayerRule, view: View, quantity: Tensor) -> dict[int, Tensor]:
        (product,) = rule.jac_t_mat_prod(view, quantity.unsqueeze(0))
        return {} if product is None else {0: product.squeeze(0)}

    def products(
        self, rule: GainRule, view: View, names: Sequence[str], quantity: Tensor
    ) -> list[Individual]:
        return [self.form(rule.individual(view, quantity)) for _ in names]


class Norms(Extension):
    savefield = "norms"
    needs = (norms,)

    def read(self, product: Individual) -> Tensor:
        return norms(product)


class Same(Norms):
    savefield = "same"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    asked.clear()
    with temporary_plugin(GainRule), temporary_plugin(HalfSquaresRule):
        yield


def run(*extensions: Any) -> tuple[nn.Sequential, Tensor]:
    model, x = extend(nn.Sequential(Gain(), Gain())), torch.rand(4, 3)
    loss = extend(HalfSquares())(model(x))
    with backpack(*extensions):
        loss.backward()
    return model, x


@pytest.mark.parametrize(("form", "factor"), [(Individual, 1), (Doubled, 2)])
def test_a_chain_carries_it(form: type[Individual], factor: int) -> None:
    root = Gradients(form)
    model, x = run(Norms(root), Same(root))
    assert asked == [form, form]  # once for each parameter: both extensions read one result
    for parameter in model.parameters():
        for n, found in enumerate(parameter.norms):
            (grad,) = torch.autograd.grad(HalfSquares()(model(x[n : n + 1])), parameter)
            torch.testing.assert_close(found, factor * grad.norm())
        assert torch.equal(parameter.norms, parameter.same)


@pytest.mark.parametrize("extension", [DiagGGNExact, DiagHessian, KFRA])
def test_a_loss_without_a_hessian_is_told(extension: Any) -> None:
    with pytest.raises(UnsupportedError, match="HalfSquaresRule does not know the Hessian: deriv"):
        run(extension())


def test_a_rule_without_products_is_told() -> None:
    told = r"GainRule covers gain of Gain '1', but has no products there: derive it from backpack_p"
    with pytest.raises(UnsupportedError, match=told):
        run(BatchGrad())
