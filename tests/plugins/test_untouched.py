"""What a plugin is given is not to be changed: the error names who did."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import Extension, backpack, extend
from backpack_core.errors import PluginCodeError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.record.nested import iter_tensors
from backpack_core.testing import (
    ExtensionCase,
    RuleCase,
    check_case,
    temporary_plugin,
)
from backpack_products import FirstOrderExtension
from backpack_products.column_propagator import ColumnPropagator
from backpack_products.held import held_by
from backpack_products.operations import dense
from backpack_secondorder.propagators import LossSqrt
from tests.plugins.test_declarations import Field, Gain, GainRule, derived


def run(extension: Extension, *rules: type) -> nn.Module:
    with temporary_plugin(*rules):
        model = extend(nn.Sequential(nn.Linear(3, 3), Gain()))
        lossfunc = extend(nn.MSELoss())
        loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 3))
        with backpack(extension):
            loss.backward()
    return model


def doubles(self: Any, product: Any) -> Any:
    return product.like.mul_(2).sum()


def overwrites_a_result(self: Any, product: Any) -> Any:
    dense(product)
    return dense(product).mul_(2).sum()


class Doubling(FirstOrderExtension):
    savefield = "doubling"
    read = doubles


def test_reading_the_gradient_in_place() -> None:
    with pytest.raises(PluginCodeError) as caught:
        run(Doubling(), GainRule)
    for word in ("Doubling.read changed the gradient at the output of Gain '1', of shape [4, 3]",):
        assert word in str(caught.value)
    assert "[Doubling, at Gain '1', rule GainRule" in str(caught.value)


class Overwriting(FirstOrderExtension):
    savefield = "overwriting"
    read = overwrites_a_result


def test_a_result_of_all() -> None:
    """The second extension to read it finds what the first has left."""
    model = extend(nn.Linear(3, 3))
    loss = extend(nn.MSELoss())(model(torch.randn(4, 3)), torch.randn(4, 3))
    with (
        pytest.raises(PluginCodeError, match=r"Overwriting.read changed a tensor of shape \[1, 4"),
        backpack(BatchGrad(), Overwriting()),
    ):
        loss.backward()


def test_the_first_to_read_a_result_is_named() -> None:
    """Whoever makes a result and changes it would hand it on to the next extension."""

    class First(FirstOrderExtension):
        savefield = "first"

        def read(self, product: Any) -> Any:
            return dense(product).mul_(2)

    model = extend(nn.Linear(3, 3))
    loss = extend(nn.MSELoss())(model(torch.randn(4, 3)), torch.randn(4, 3))
    with (
        pytest.raises(PluginCodeError, match=r"First.read changed a tensor of shape \[1, 4"),
        backpack(First(), BatchGrad(), check="never"),
    ):
        loss.backward()


METHODS = {
    "_jac_t_mat_prod": (lambda self, view, mat: mat.mul_(2), "a tensor of shape [3, 4, 3]"),
    "_param_jac_t_mat_prod": (
        lambda self, view, name, mat: view.input.mul_(2) * mat,
        "an input of Gain '1', of shape [4, 3],",
    ),
    "_param_product": (
        lambda self, view, name, mat: view.output.detach().mul_(2) * mat,
        "an output of Gain '1'",
    ),
    "second": (lambda self, view, mat: view.parameter("weight").data.mul_(2) * mat, "'weight' of"),
}


@pytest.mark.parametrize("method", ["_jac_t_mat_prod", "_param_jac_t_mat_prod", "_param_product"])
def test_a_rule(method: str) -> None:
    function, expected = METHODS[method]
    with pytest.raises(PluginCodeError) as caught:
        run(DiagGGNExact(), derived(GainRule, **{method: function}))
    assert f"Slip.{method} changed {expected}" in str(caught.value)
    assert "return a new tensor" in str(caught.value)


def test_the_method_that_did_it_is_named_though_others_were_asked_before() -> None:
    """What is shown is looked at once in a visit; a change shows behind the call that made it."""

    class Late(FirstOrderExtension):
        savefield = "late"

        def read(self, product: Any) -> Any:
            if product.name == "weight" and type(product.module) is nn.Linear:
                product.module.bias.data.mul_(2)
                product.like.mul_(2)
            return dense(product).sum()

    with pytest.raises(PluginCodeError, match=r"Late\.read changed the gradient .* Linear '0'"):
        run(Late(), GainRule)


def test_a_result_in_the_memory_of_an_input() -> None:
    class Input(FirstOrderExtension):
        savefield = "received"

        def read(self, product: Any) -> Any:
            return product.inp.squeeze() if product.name == "weight" else product.like

    model, x = extend(nn.Linear(3, 3)), torch.randn(4, 3)
    loss = model(x).square().sum()
    with backpack(Input(), check="never"):
        loss.backward()
    assert model.weight.received.data_ptr() != x.data_ptr()
    torch.testing.assert_close(model.weight.received, x)


@pytest.mark.parametrize("make", [list, tuple, lambda items: {"of a dict": [*items]}])
def test_results_of_several_tensors_share_no_memory(make: Any) -> None:
    class Several(FirstOrderExtension):
        savefield = "several"

        def read(self, product: Any) -> Any:
            return make((dense(product), dense(product)[0]))

    model = extend(nn.Linear(3, 3))
    with backpack(Several(), BatchGrad()):
        model(torch.randn(4, 3)).square().sum().backward()
    first, second = iter_tensors(model.weight.several)
    first.zero_()
    assert second.any()
    assert torch.equal(second, model.weight.grad_batch)
    second.zero_()
    assert model.weight.grad_batch.any()


@dataclass(frozen=True)
class Restless(LossSqrt):
    def propagate(self, rule: Any, view: Any, quantity: Any) -> Any:
        quantity.mat.mul_(2)
        return super().propagate(rule, view, quantity)


@dataclass(frozen=True)
class Wrapping(LossSqrt):
    @wraps(ColumnPropagator.propagate)  # which says that it is the core's
    def propagate(self, rule: Any, view: Any, quantity: Any) -> Any:
        quantity.mat.mul_(2)
        return super().propagate(rule, view, quantity)


@dataclass(frozen=True)
class Starting(LossSqrt):
    def start(self, rule: Any, view: Any) -> Any:
        found = super().start(rule, view)
        view.input.mul_(2)
        return found


class OfRestless(Extension):
    savefield = "of_restless"

    def read(self, product: Any) -> Any:
        return dense(product).sum()


@pytest.mark.parametrize("kind", [Restless, Wrapping])
def test_a_propagator(kind: type[LossSqrt]) -> None:
    match = rf"{kind.__name__}\.propagate changed a tensor of shape"
    with pytest.raises(PluginCodeError, match=match):
        run(OfRestless(kind()), GainRule)


def test_a_propagator_at_a_loss() -> None:
    match = r"Starting\.start changed an input of MSELoss, of shape \[4, 3\],"
    with pytest.raises(PluginCodeError, match=match):
        run(OfRestless(Starting()), GainRule)


def test_a_quantity_may_have_a_field_that_readings_have_as_a_method() -> None:
    """Quantities are of any class, so no name has a meaning there."""
    quantity = SimpleNamespace(held=torch.ones(2), join=torch.ones(3))
    assert {id(tensor) for tensor, _ in held_by(quantity)} == {
        id(t) for t in vars(quantity).values()
    }


def test_what_is_ones_own_may_be_changed() -> None:
    class Own(Field):
        savefield = "own"
        needs = (dense,)

        def read(self, product: Any) -> Tensor:
            return dense(product).sum(1).mul_(2)

    run(Own(), GainRule)


def test_the_kit_says_so_of_rules() -> None:
    kind = derived(GainRule, _jac_t_mat_prod=METHODS["_jac_t_mat_prod"][0])
    case = RuleCase(Gain, lambda n: torch.randn(n, 3), rule=kind)
    failed = [result for result in check_case(case) if not result.ok]
    assert any("Slip._jac_t_mat_prod changed" in result.message for result in failed)


def test_the_kit_says_so_of_extensions() -> None:
    failed = [result for result in check_case(ExtensionCase(Doubling)) if not result.ok]
    assert any("Doubling.read changed" in result.message for result in failed)
