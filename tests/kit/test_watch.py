"""How a quantity is computed, from declarations and from a run."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from backpack_core import Extension, View, backpack, extend
from backpack_core import extensions as installed
from backpack_core.cli.table import Kind
from backpack_core.cli.watch import declared_form, is_fast, kind_of, watch
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_core.testing import temporary_plugin
from backpack_products import (
    AffineProduct,
    DenseProduct,
    FirstOrderExtension,
    LookupProduct,
    ProductRule,
    SampleProduct,
    ScaleProduct,
)
from backpack_products.open_functions import Operation
from backpack_products.operations import batch_sum, square_sum
from tests.kit.layers import Gain, GainRule

if TYPE_CHECKING:
    from somewhere import OtherProduct  # type: ignore[import-not-found]


@pytest.mark.parametrize(
    ("module", "form"),
    [
        (nn.Linear(2, 2), AffineProduct),
        (nn.Conv2d(1, 1, 1), AffineProduct),
        (nn.LSTM(2, 2), AffineProduct),
        (nn.MultiheadAttention(2, 1), AffineProduct),
        (nn.LayerNorm(2), ScaleProduct),
        (nn.EmbeddingBag(2, 2), LookupProduct),
        (nn.PReLU(), DenseProduct),
        (nn.Tanh(), SampleProduct),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_form_that_a_rule_declares(module: nn.Module, form: type[SampleProduct]) -> None:
    ensure_loaded()
    assert declared_form(type(registry.resolve(module).rule)) is form


class Undeclared(ProductRule):
    def _param_product(self, view: View, name: str, mat: Tensor):  # type: ignore[no-untyped-def]
        return DenseProduct(mat)


class OnlyForTypeCheckers(ProductRule):
    def _param_product(self, view: View, name: str, mat: Tensor) -> OtherProduct:
        raise NotImplementedError


class OneOfTwo(ProductRule):
    def _param_product(self, view: View, name: str, mat: Tensor) -> AffineProduct | LookupProduct:
        raise NotImplementedError


@pytest.mark.parametrize("rule", [Undeclared, OnlyForTypeCheckers, OneOfTwo])
def test_a_form_that_is_not_declared_may_be_any(rule: type[ProductRule]) -> None:
    assert declared_form(rule) is SampleProduct


@Operation
def own(product: SampleProduct) -> Tensor:
    return batch_sum(product)


class Own(FirstOrderExtension):
    savefield = "own"
    needs = (own,)

    def read(self, product: SampleProduct) -> Tensor:
        return own(product)


class Both(Own):
    needs = (own, square_sum)


@pytest.mark.parametrize(
    ("extension", "form", "expected"),
    [
        ("SumGradSquared", AffineProduct, True),
        ("SumGradSquared", LookupProduct, True),
        ("SumGradSquared", ScaleProduct, False),
        ("Variance", ScaleProduct, False),
        ("BatchGrad", AffineProduct, False),
        ("GGNMP", AffineProduct, False),
        ("KFAC", AffineProduct, True),
        (Own, AffineProduct, False),
        (Both, AffineProduct, False),
    ],
)
def test_fast_is_what_forms_nothing(
    extension: str | type[Extension], form: type[SampleProduct], expected: bool
) -> None:
    kind = getattr(installed, extension) if isinstance(extension, str) else extension
    assert is_fast(kind, form) is expected


def kind_in(extension: Extension, layer: nn.Module, x: Tensor) -> Kind:
    model, lossfunc = extend(nn.Sequential(layer, nn.Flatten())), extend(nn.MSELoss())
    forms = watch(extension, set(layer.modules()))
    output = model(x)
    with backpack(extension), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lossfunc(output, torch.zeros_like(output)).backward()
    return kind_of(type(extension), forms)


@pytest.mark.parametrize(
    ("extension", "expected"),
    [
        ("SumGradSquared", "fast"),
        ("BatchGrad", "rule"),
        ("DiagGGNExact", "fast"),
        ("DiagHessian", "fast"),
        ("KFRA", "rule"),
    ],
)
def test_a_run_agrees_with_the_declarations(extension: str, expected: Kind) -> None:
    instance = getattr(installed, extension)()
    assert kind_in(instance, nn.Linear(2, 3), torch.rand(4, 2)) == expected


def test_without_a_rule_and_with_one() -> None:
    x = torch.rand(3, 4)
    assert kind_in(installed.SumGradSquared(), Gain(), x) == "autodiff"
    with temporary_plugin(GainRule):
        assert kind_in(installed.SumGradSquared(), Gain(), x) == "rule"


def test_other_modules_do_not_count() -> None:
    model, lossfunc = extend(nn.Sequential(nn.Linear(2, 2), Gain2())), extend(nn.MSELoss())
    extension = installed.SumGradSquared()
    forms = watch(extension, {model[1]})
    with temporary_plugin(Gain2Rule):
        output = model(torch.rand(3, 2))
        with backpack(extension):
            lossfunc(output, torch.zeros_like(output)).backward()
    assert forms == {DenseProduct}


class Gain2(Gain):
    """Two features, and a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))


class Gain2Rule(GainRule):
    module_types = (Gain2,)


def test_watching_changes_no_value() -> None:
    """The value is the one of the extension."""
    x, values = torch.rand(3, 2), []
    layer = nn.Linear(2, 2)
    for watched in (False, True):
        extension = installed.DiagGGNExact()
        if watched:
            watch(extension, {layer})
        output = extend(layer)(x)
        with backpack(extension):
            extend(nn.MSELoss())(output, torch.zeros_like(output)).backward()
        values.append(layer.weight.diag_ggn_exact)
    assert torch.equal(*values)
