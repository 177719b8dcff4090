"""What plugins get wrong is said of the plugin that did it, with what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import LayerRule, Propagator, View, backpack
from backpack_core.contract.propagator import Reading
from backpack_core.errors import (
    PluginCodeError,
    PluginError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from backpack_core.extensions import BatchGrad, BatchL2Grad, DiagGGNExact
from backpack_core.testing import temporary_plugin
from backpack_products import (
    AffinePairsRule,
    AffineProduct,
    ColumnPropagator,
    Columns,
    ElementwiseRule,
    FirstOrderExtension,
    HessianLossRule,
    LookupProduct,
    ParametricRule,
    ProductRule,
    SampleProduct,
    ScaleProduct,
    SecondOrderExtension,
)
from backpack_products.operations import dense, square_sum
from backpack_secondorder.whole import GraphExtension, GraphReading
from tests.cases import Net, classification
from tests.core.test_bad_use import Shift, message


class OfShift(ParametricRule):
    """What rules of a shift have in common: those here are wrong about its parameter only."""

    module_types = (Shift,)
    params = ("shift",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat


@pytest.mark.parametrize(
    ("form", "factors", "found"),
    [
        (AffineProduct, lambda out, x: (out, x), r"\[V, N, S, G, O\] and .* and \[3, 3\]"),
        (
            AffineProduct,
            lambda out, x: (out[:, :, None, None], x[:1, None, None]),
            r"\[N, S, G, I\].* Got \[\d, 3, 1, 1, 3\] and \[1, 1, 1, 3\]",
        ),
        (ScaleProduct, lambda out, x: (out, None), r"\[V, N, S, D\].* Got \[\d, 3, 3\]\."),
        (ScaleProduct, lambda out, x: (out.unsqueeze(2), x), r"\[N, S, D\]\. Got "),
        (
            AffineProduct,
            lambda out, x: (out[:, :, None, None], x[:, None, None]),
            r"of a parameter \[3\]\. Got \[\d, 3, 1, 1, 3\] and \[3, 1, 1, 3\]",
        ),
        (LookupProduct, lambda out, x: (out.unsqueeze(2), x[:, 0]), r"\[N, K\].* and \[3\]"),
    ],
)
def test_factors_that_do_not_fit_are_the_rule_s(form: Any, factors: Any, found: str) -> None:
    class OfFactors(OfShift, ProductRule):
        def _param_product(self, view: View, name: str, mat: Tensor) -> SampleProduct:
            product: SampleProduct = form(*factors(mat, view.input), view.parameter(name).shape)
            return product

    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    for extension in (BatchGrad(), DiagGGNExact(), BatchL2Grad()):
        with temporary_plugin(OfFactors), pytest.raises(ShapeError, match=found) as error:
            problem.run(extension)
        assert message(error).startswith(f"{form.__name__} takes factors")
        assert "at Shift '1', rule OfFactors" in message(error)


@pytest.mark.parametrize("pair", [None, 1, (1, 2, 3), torch.zeros(1, 5, 1, 1, 999)])
def test_a_pair_that_is_none(pair: Any) -> None:
    class OfPairs(OfShift, AffinePairsRule):
        def affine_pair(self, view: View, name: str, mat: Tensor) -> Any:
            return pair

    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    with (
        temporary_plugin(OfPairs),
        pytest.raises(
            ShapeError, match=r"OfPairs\.affine_pair returned .* expected a pair"
        ) as error,
    ):
        problem.run(BatchGrad())
    assert len(str(error.value)) < 500


def test_a_rule_with_a_wrong_jacobian_is_among_the_causes() -> None:
    class Doubled(ElementwiseRule):
        module_types = (nn.Tanh,)

        def derivative(self, view: View) -> Tensor:
            return 2 * (1 - view.output.square())

    class Tanh(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    Doubled.module_types = (Tanh,)
    problem = classification(nn.Sequential(nn.Linear(3, 3), Tanh(), nn.Linear(3, 3)), (3,))
    with (
        temporary_plugin(Doubled),
        pytest.raises(
            UnsupportedError, match=r"the layer rule of what uses it is wrong.*check_case"
        ),
    ):
        problem.run(DiagGGNExact())


def test_declarations_of_a_class_that_nobody_registered() -> None:
    class Count(FirstOrderExtension):
        savefield = "count"
        needs = dense  # type: ignore[assignment]

        def read(self, product: SampleProduct) -> Tensor:
            return dense(product).sum()

    with pytest.raises(
        PluginError, match=r"needs must be a tuple of operations.*needs = \(dense,\)"
    ):
        backpack(Count())


# What else rules and extensions do.


class BadShift(OfShift):
    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return mat.sum(1)


def test_wrong_shape_at_a_parameter() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    with temporary_plugin(BadShift), pytest.raises(ShapeError) as error:
        problem.run(BatchGrad())
    for word in ("BadShift._param_jac_t_mat_prod", "[1, 3]", "[1, 3, 3]", "'shift'", "Shift '1'"):
        assert word in message(error)
    assert "BatchGrad of backpack-plugin-firstorder" in message(error)


@pytest.mark.parametrize(
    ("method", "result", "said"),
    [
        ("_jac_t_mat_prod", lambda *given: (given[-1], given[-1]), "returned 2 products"),
        ("_jac_t_mat_prod", lambda *given: given[-1].long(), "of torch.int64 at Shift '1', expec"),
        ("_param_jac_t_mat_prod", lambda *given: given[-1] > 0, "'shift' returned .*torch.bool"),
        ("batch_axis", lambda *given: 7, r"returned 7 for an output of Shift '1' of shape \[\d, 3"),
        ("batch_axis", lambda *given: "0", "batch_axis returned '0' for"),
        ("_param_product", lambda *given: given[-1].new_zeros(99, 99), "expected a SampleProduct"),
    ],
)
def test_what_a_rule_returns(method: str, result: Any, said: str) -> None:
    wrong = type("Wrong", (OfShift,), {"_param_jac_t_mat_prod": lambda *given: given[-1]})
    setattr(wrong, method, result)
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    with temporary_plugin(wrong), pytest.raises(ShapeError, match=said) as error:
        problem.run(DiagGGNExact())
    assert message(error).startswith("Wrong.")
    assert len(message(error)) < 500


def test_rule_without_second_derivative() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    class SineRule(ElementwiseRule):
        module_types = (Sine,)

        def derivative(self, view: View) -> Tensor:
            return torch.cos(view.input)

    with temporary_plugin(SineRule):
        problem = classification(nn.Sequential(nn.Linear(3, 3), Sine(), nn.Linear(3, 3)), (3,))
        problem.check()


class Impatient(FirstOrderExtension):
    """Fails with an error of its own."""

    savefield = "impatient"

    def read(self, product: SampleProduct) -> Tensor:
        raise ZeroDivisionError("on purpose")


def test_errors_say_where_they_happened() -> None:
    problem = classification(nn.Sequential(nn.Sequential(nn.Linear(3, 3))), (3,))
    with pytest.raises(PluginCodeError, match="ZeroDivisionError: on purpose") as error:
        problem.run(Impatient())
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert f"{__file__}:" in message(error)
    where = error.value.backpack_context
    for word in ("Impatient", "Linear '0.0'", "LinearRule of backpack-plugin-layers"):
        assert word in where


# Propagators.


@dataclass(frozen=True)
class Root(ColumnPropagator):
    starts: Any
    subsampling: tuple[int, ...] | None = None

    def start(self, rule: HessianLossRule, view: View) -> Columns:
        columns: Columns = self.starts(rule.sqrt_hessian(view))
        return columns


@dataclass
class Unfrozen(ColumnPropagator):
    starts: Any

    def start(self, rule: HessianLossRule, view: View) -> Columns:
        columns: Columns = self.starts(rule.sqrt_hessian(view))
        return columns


class OfRoot(SecondOrderExtension):
    savefield = "of_root"
    needs = (square_sum,)

    def read(self, product: SampleProduct) -> Tensor:
        return square_sum(product)


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        (lambda mat: None, r"<class 'NoneType'>"),
        (lambda mat: mat, r"<class 'torch.Tensor'>"),
        (lambda mat: Columns.start("root", mat[0]), r"shape \[3, 3\]"),
        (lambda mat: Columns.start("root", mat.sum(1, keepdim=True)), r"shape \[2, 1, 3\]"),
    ],
)
def test_columns_that_do_not_fit_are_the_propagator_s(starts: Any, found: str) -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), (3,))
    told = rf"Root\.start must return Columns\.start\(name, mat\): it gave {found} at .*\[V, 3"
    with pytest.raises(ShapeError, match=told):
        problem.run(OfRoot(Root(starts)))


@dataclass(frozen=True)
class Miscounting(Root):
    gives: Any = None

    def products(self, rule: Any, view: View, names: Any, quantity: Columns) -> Any:
        return self.gives(super().products(rule, view, names, quantity))


@pytest.mark.parametrize("gives", [lambda found: found[:1], lambda found: found[0]])
def test_a_propagator_gives_a_reading_for_each_parameter(gives: Any) -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3)), (3,))
    root = Miscounting(lambda mat: Columns.start("root", mat), gives=gives)
    told = (
        r"Miscounting\.products returned .*AffineProduct.* at Linear '0', expected a list with .*"
    )
    with pytest.raises(ShapeError, match=told + r"\['weight', 'bias'\]"):
        problem.run(OfRoot(root))


@dataclass(frozen=True)
class SumsWrongly(Root):
    def merge(self, first: Columns, second: Columns) -> Any:
        return first.mat + second.mat


@dataclass(frozen=True)
class ArrivesWrongly(Root):
    def arrive(self, rule: Any, view: View, waiting: Columns | None) -> Any:
        return super().arrive(rule, view, waiting).mat


@pytest.mark.parametrize("kind", [SumsWrongly, ArrivesWrongly])
def test_what_travels_are_columns(kind: type[Root]) -> None:
    parts = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
    model = Net(lambda net, x: net.b(torch.sin(h := net.a(x)) + h), **parts)
    told = rf"The quantity of {kind.__name__} is tensor.*: arrive, .* give Columns"
    with pytest.raises(ShapeError, match=f"(?s){told}"):
        classification(model, (3,)).run(OfRoot(kind(lambda mat: Columns.start("root", mat))))


def test_a_propagator_is_a_value() -> None:
    for wrong in (None, Root, Unfrozen(None)):
        with pytest.raises(
            UsageError, match=r"OfRoot needs a propagator: .*frozen dataclass.* Got "
        ):
            OfRoot(wrong)  # type: ignore[arg-type]


# What a propagator that carries something of its own returns.


@dataclass(frozen=True)
class Depth(Propagator):
    per_sample = False
    subsampling: tuple[int, ...] | None = None
    field: Any = None

    def start(self, rule: HessianLossRule, view: View) -> Any:
        return 0

    def propagate(self, rule: LayerRule, view: View, quantity: Any) -> Any:
        return {position: quantity for position, _ in enumerate(view.inputs)}

    def products(
        self, rule: ParametricRule, view: View, names: Sequence[str], quantity: Any
    ) -> Any:
        return [Reading(view.parameter_itself(name).shape) for name in names]


class DepthOf(SecondOrderExtension):
    savefield = "depth"

    def read(self, product: Any) -> int:
        return 1


@pytest.mark.parametrize(
    ("method", "value", "said"),
    [
        ("start", None, r"Slip\.start returned None at .*, expected the quantity"),
        ("propagate", None, r"Slip\.propagate returned None at Linear '2', expected a dictionary"),
        ("propagate", [0], r"Slip\.propagate returned \[0\] at"),
        ("propagate", {7: 0}, r"Slip\.propagate returned {7: 0} at .* of its 1 inputs"),
        ("propagate", {"a": 0}, r"Slip\.propagate returned {'a': 0} at"),
        ("residual", None, r"Slip\.residual returned None at Linear '2', expected a dictionary"),
        ("residual", {7: 0}, r"Slip\.residual returned {7: 0} at .* of its 1 inputs"),
        ("products", None, r"Slip\.products returned None at"),
        ("products", [1, 2], r"Slip\.products returned \[1, 2\] at .* a reading for each"),
    ],
)
def test_what_a_propagator_returns(method: str, value: Any, said: str) -> None:
    kind = type("Slip", (Depth,), {method: lambda *given: value})
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with pytest.raises(ShapeError, match=said) as error:
        classification(model, (3,)).run(DepthOf(kind()))
    assert "DepthOf" in message(error)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize("value", [None, 3, [1], [(0,)], {0: 1}, [("a", 1)], [(9, 1)]])
def test_what_a_propagator_returns_between_modules(value: Any) -> None:
    kind = type("Slip", (Depth,), {"cross": lambda *given: value})
    model = nn.Sequential(nn.Linear(3, 3), Residual(nn.Linear(3, 3)), nn.Linear(3, 3))
    said = r"Slip\.cross returned .* at AddBackward0, expected pairs: a position in its 2"
    with pytest.raises(ShapeError, match=said) as error:
        classification(model, (3,)).run(DepthOf(kind()))
    assert "DepthOf" in message(error)


class LargestIndex(FirstOrderExtension):
    savefield = "largest_index"

    def read(self, product: SampleProduct) -> Tensor:
        return dense(product)[0].flatten(1).abs().argmax(1)


def test_indices_are_not_rounded_to_the_dtype_of_the_parameter() -> None:
    model = nn.Linear(3, 300)
    problem = classification(model, (3,))
    problem.run(LargestIndex())
    assert model.weight.largest_index.dtype == torch.int64


def test_propagators_are_looked_at() -> None:
    with pytest.raises(UsageError, match="fields that can be hashed"):
        DepthOf(Depth(field=[1]))
    kind = type("Slip", (Depth,), {"products": lambda self, rule: []})
    with pytest.raises(PluginError, match=r"products is called as products\(self, rule"):
        backpack(DepthOf(kind()))


class Late(FirstOrderExtension):
    savefield = "late"
    is_deferred = True

    def read(self, product: SampleProduct) -> int:
        return 1


class Whole(GraphExtension):
    savefield = "whole"

    def begin(self) -> GraphReading:
        return GraphReading()


@pytest.mark.parametrize("value", [None, [1], {"weight": 1}, {nn.Linear(1, 1).weight: None}])
def test_values_that_are_no_mapping_of_parameters(value: Any) -> None:
    reading = type("Reads", (GraphReading,), {"results": lambda *_: value})()
    whole = type("Slip", (Whole,), {"begin": lambda self: reading})
    late = type("Slip", (Late,), {"finish": lambda *_: value})
    begun = type("Slip", (Whole,), {"begin": lambda self: value})
    wanted = "a mapping from parameters to values"
    for kind, said in ((whole, wanted), (late, wanted), (begun, "a GraphReading")):
        with pytest.raises(PluginCodeError, match=rf"Slip\.\w+ must return {said}"):
            classification(nn.Linear(3, 3), (3,)).run(kind())


def test_an_attribute_of_a_reserved_name_is_named() -> None:
    class Mine(BatchGrad):
        def __init__(self) -> None:
            super().__init__(savefield="mine")
            self.is_whole = True  # type: ignore[misc]

    problem = classification(nn.Linear(4, 3), (4,))
    with pytest.raises(NotImplementedError, match=r"Mine\.is_whole is true.*another name"):
        problem.run(Mine())
