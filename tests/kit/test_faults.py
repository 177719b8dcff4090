"""Rules that are broken on purpose: the kit names the fault each time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from backpack_core import LayerRule, View
from backpack_core.testing import RuleCase, check_case
from backpack_products import (
    ElementwiseRule,
    ParametricRule,
    ProductRule,
    SampleProduct,
    SecondOrderRule,
)
from backpack_products.operations import batch_sum, dense, square_sum
from tests.kit.layers import (
    Centre,
    CentreRule,
    Cube,
    CubeRule,
    Doubled,
    Gain,
    GainRule,
    Grouped,
    GroupedRule,
    Power,
    PowerRule,
    Score,
    ScoreRule,
    SlopeIsANumber,
    case_of,
)


class WrongSign(GainRule):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return -super()._jac_t_mat_prod(view, mat)


class ForgottenGroup(GroupedRule):
    def affine_input(self, view: View) -> Tensor:
        first = super().affine_input(view)[:, :, :1]
        return first.expand(-1, -1, 2, -1)


class GainProduct(SampleProduct):
    """``out[v, n] ⊙ inp[n]``."""

    def __init__(self, out: Tensor, inp: Tensor) -> None:
        super().__init__(*out.shape[:2], inp.shape[1:], out)
        self.out, self.inp = out, inp

    def part(self, columns: slice, samples: slice) -> Tensor:
        return self.out[columns, samples] * self.inp[samples]


class PartialParams(GroupedRule):
    params = ("weight",)


class RepeatedEntries(GroupedRule):
    """The entries of one group in the place of both."""

    def arrangement(self, view: View, name: str) -> Callable[[Tensor], Tensor] | None:
        if name == "bias":
            return None
        return lambda mat: mat[..., :1, :, :].repeat_interleave(2, -3).flatten(-3, -2)


class ArrangesLeadingAxes(GroupedRule):
    """Right for a matrix, wrong for several."""

    def arrangement(self, view: View, name: str) -> Callable[[Tensor], Tensor] | None:
        shape = view.parameter_itself(name).shape
        return lambda mat: mat.flatten().flip(0).reshape(*mat.shape[: mat.dim() - 3], *shape)


class ProductOfOneSample(GainProduct):
    """Its fast version of a sum over samples takes the first sample."""


@batch_sum.register
def batch_sum_of_one(product: ProductOfOneSample) -> Tensor:
    return dense(product)[:, 0]


class ProductOfOneColumn(GainProduct):
    """Its fast version of a square sum leaves out all columns but the first."""


@square_sum.register
def square_sum_of_one(product: ProductOfOneColumn) -> Tensor:
    return dense(product)[0].square().sum(0)


class OwnFormRule(ProductRule):
    """The rule of ``Gain`` with a form of its own."""

    module_types = (Gain,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True
    jacobian_is_constant = True
    form: ClassVar[type[GainProduct]] = GainProduct

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.parameter("weight")

    def _param_product(self, view: View, name: str, mat: Tensor) -> SampleProduct:
        return self.form(mat, view.input)


class MissingBatchSum(OwnFormRule):
    form = ProductOfOneSample


class MissingColumnSum(OwnFormRule):
    form = ProductOfOneColumn


class WrongSlice(OwnFormRule):
    """Right as a whole, wrong piece by piece."""

    class Product(GainProduct):
        def part(self, columns: slice, samples: slice) -> Tensor:
            return super().part(columns, slice(0, len(range(self.samples)[samples])))

    form = Product


class FalseZeroHessian(CubeRule):
    hessian_is_zero = True


class Times(Module):
    """``y = a ⊙ b``, linear in each, not in both."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class FalseZeroMixed(SecondOrderRule):
    module_types = (Times,)
    hessian_is_zero = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        a, b = view.input, view.tensor_input(1)
        return mat * b, mat * a


def of_two(layer: type[Module], rule: type[LayerRule]) -> RuleCase:
    return RuleCase(layer, lambda n: (torch.randn(n, 4), torch.randn(n, 4)), rule=rule)


class FalseConstantJacobian(CubeRule):
    jacobian_is_constant = True


class ScaleOfEach(Module):
    """``y = s x``, with a constant for each sample: linear, but of several Jacobians."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(1.0, 2.0, len(x)).unsqueeze(1)


class OneJacobianOfSeveral(SecondOrderRule):
    module_types = (ScaleOfEach,)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        scale = torch.linspace(1.0, 2.0, view.full.batch_size).unsqueeze(1)
        return mat * (scale if view.indices is None else scale[list(view.indices)])


class ScaleByTheBatch(Module):
    """``y = s(Σ x) x``, with a step function: one Jacobian for all samples, not for all inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.detach().sum() * 100).round().remainder(7)


class OneJacobianHere(SecondOrderRule):
    module_types = (ScaleByTheBatch,)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * (view.full.inputs[0].detach().sum() * 100).round().remainder(7)


class SquaredGain(Gain):
    """``y = w² ⊙ x``."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight**2


class FalseLinearity(GainRule):
    module_types = (SquaredGain,)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.parameter("weight") ** 2

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return 2 * mat * view.input * view.parameter("weight")


class Leak(GainRule):
    """Keeps every call it sees."""

    seen: ClassVar[list[View]] = []

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        self.seen.append(view)
        return super()._param_jac_t_mat_prod(view, name, mat)


class State(GainRule):
    def check(self, view: View) -> None:
        self.last = view.batch_size


class DrawsNumbers(GainRule):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return super()._jac_t_mat_prod(view, mat + 0 * torch.rand(1, dtype=mat.dtype))


class StoresOnTheModule(GainRule):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        view.call.module.__dict__["kept"] = mat
        return super()._jac_t_mat_prod(view, mat)


class WrongInEvalMode(GainRule):
    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        found = super()._param_jac_t_mat_prod(view, name, mat)
        return found if view.training else 2 * found


class WrongWithoutBias(GroupedRule):
    """Right for all parameters, and for none."""

    def affine_input(self, view: View) -> Tensor:
        found = super().affine_input(view)
        return found if view.module.bias.requires_grad else 2 * found


class WidensColumns(GainRule):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return super()._jac_t_mat_prod(view, mat).double()


class ReadsTheModuleOfNow(GainRule):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.call.module.get_parameter("weight")


class WritesToColumns(GainRule):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat.mul_(view.parameter("weight"))


class UndeclaredMixing(LayerRule):
    module_types = (Centre,)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat - mat.mean(1, keepdim=True)


class WrongSecondDerivative(CubeRule):
    def second_derivative(self, view: View) -> Tensor:
        return 3 * view.input


class Pairs(Module):
    """``y_i = x_i x_{i-1}``."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.roll(1, 1)


class FalseDiagonal(SecondOrderRule):
    module_types = (Pairs,)
    hessian_is_diagonal = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.input.roll(1, 1) + (mat * view.input).roll(-1, 2)


class KeepsColumns(GainRule):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return view.once("product", lambda: super(KeepsColumns, self)._jac_t_mat_prod(view, mat))


class KeepsTheFirstInput(GainRule):
    """In a table that is no attribute of the rule."""

    first: ClassVar[dict[tuple[int, ...], Tensor]] = {}

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return mat * self.first.setdefault(tuple(mat.shape), view.input)


class Detaches(GainRule):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.parameter("weight").detach()


class WithoutGraph(GainRule):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        with torch.no_grad():
            return mat * view.parameter("weight")


class ReadsTheInputUnchecked(GainRule):
    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return mat * view.inputs[0].detach()


class Wrong(GainRule):
    """Twice the product if a condition on the columns holds."""

    def is_wrong(self, columns: int, samples: int) -> bool:
        return columns == 1

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return super()._jac_t_mat_prod(view, mat) * (1 + self.is_wrong(*mat.shape[:2]))


class WrongForManyColumns(Wrong):
    def is_wrong(self, columns: int, samples: int) -> bool:
        return columns > 3


class WrongForOneSample(Wrong):
    def is_wrong(self, columns: int, samples: int) -> bool:
        return samples == 1


class WrongForManySamples(Wrong):
    def is_wrong(self, columns: int, samples: int) -> bool:
        return samples > 3


class RaisesForNone(Wrong):
    def is_wrong(self, columns: int, samples: int) -> bool:
        return 1 // samples > 1


class Sigmoid(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid()


class Overflows(ElementwiseRule):
    module_types = (Sigmoid,)

    def derivative(self, view: View) -> Tensor:
        return view.input.exp() / (1 + view.input.exp()) ** 2

    def second_derivative(self, view: View) -> Tensor:
        y = view.output
        return y * (1 - y) * (1 - 2 * y)


class Settings(Module):
    """``y = (eps + buffer) x``."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.5
        self.register_buffer("buffer", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.buffer + self.eps)


class ReadsTheBufferOfNow(SecondOrderRule):
    module_types = (Settings,)
    hessian_is_zero = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * (view.call.module.buffer + view.module.eps)


class ReadsTheSettingOfNow(ReadsTheBufferOfNow):
    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * (view.parameter("buffer") + view.call.module.eps)


class WrongSecondDerivativeOfOne(PowerRule):
    def _second_derivative_mat_prod(self, view: View, grad_output: Tensor, mat: Tensor) -> Tensor:
        right = super()._second_derivative_mat_prod(view, grad_output, mat)
        return right * (len(mat) > 1)


class Turned(Module):
    """``[N, S, D] -> [S, N, D]``."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.transpose(0, 1)


class TurnedRule(SecondOrderRule):
    module_types = (Turned,)
    hessian_is_zero = True

    def batch_axis(self, view: View, index: int) -> int:
        return 1

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return 2 * mat


class ForgottenAxis(SecondOrderRule):
    module_types = (Turned,)
    hessian_is_zero = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return 2 * mat.transpose(1, 2)


def turned(rule: type[LayerRule]) -> RuleCase:
    return RuleCase(Turned, lambda n: torch.randn(n, 5, 4), rule=rule)


class Both(Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.last = Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.first).tanh() * self.last


class BothRule(ParametricRule):
    module_types = (Both,)
    params = ("first", "last")

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return self._param_jac_t_mat_prod(view, "first", mat) / view.input * view.parameter("first")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        value = (view.input * view.parameter("first")).tanh()
        slope = view.input * (1 - value.square()) * view.parameter("last")
        return mat * (slope if name == "first" else value)


class LastOnly(BothRule):
    params = ("last",)


# Rule, the check that must name the fault, and what its message must say.
FAULTS = [
    (case_of(Pairs, FalseDiagonal), "hessian_is_diagonal", "is declared: ∂²f/∂x²"),
    (case_of(Cube, CubeRule, twice_differentiable=False), "not_twice_differentiable", "twice:"),
    (case_of(Gain, GainRule, overwrites_input=True), "overwritten_input", "accepts an overwritten"),
    (case_of(Gain, WrongSign), "jac_t_mat_prod", "wrong sign"),
    (case_of(Grouped, ForgottenGroup), "affine_form", "W x \\+ b"),
    (case_of(Grouped, ForgottenGroup), "param_jac_t_mat_prod", "'weight'"),
    (case_of(Grouped, RepeatedEntries), "affine_weight", "is not a permutation"),
    (case_of(Grouped, ArrangesLeadingAxes), "affine_weight", "axes in front"),
    (case_of(Gain, MissingBatchSum), "operations", "batch_sum"),
    (case_of(Gain, MissingColumnSum), "operations", "square_sum"),
    (case_of(Gain, WrongSlice), "operations", "within 1 bytes"),
    (case_of(Cube, FalseZeroHessian), "hessian_is_zero", "does not vanish"),
    (of_two(Times, FalseZeroMixed), "hessian_is_zero", "inputs 0 and 1 does not vanish"),
    (case_of(Cube, FalseConstantJacobian), "jacobian_is_constant", "mat, input 0, from sample 0"),
    (case_of(ScaleOfEach, OneJacobianOfSeveral), "jacobian_is_constant", "mat, input 0"),
    (case_of(ScaleByTheBatch, OneJacobianHere), "jacobian_is_constant", "at another input"),
    (case_of(SquaredGain, FalseLinearity), "linear_in_params", "does not vanish"),
    (case_of(Gain, Leak), "no_live_calls", "outlive their graph"),
    (case_of(Gain, State), "accepts", "keep no state"),
    (case_of(Grouped, PartialParams), "accepts", "params leaves out 'bias', which a Grouped has"),
    (case_of(Gain, DrawsNumbers), "accepts", "random numbers"),
    (case_of(Gain, StoresOnTheModule), "accepts", "'kept'"),
    (case_of(Gain, WrongInEvalMode), "other_mode", "2 times .* in the other mode, train or eval"),
    (case_of(Grouped, WrongWithoutBias), "partly_frozen", "layer.weight"),
    (case_of(Gain, WidensColumns), "keeps_dtype", "float64, not torch.float32.* The columns"),
    (case_of(Gain, ReadsTheModuleOfNow), "changed_since", "read it from the view"),
    (case_of(Gain, WritesToColumns), "accepts", "changed a tensor"),
    (case_of(Centre, UndeclaredMixing), "mixes_samples", "influence each other"),
    (case_of(Cube, WrongSecondDerivative), "second_derivative", "0.5 times"),
    (case_of(Cube, WrongSecondDerivative), "mean", "DiagHessian"),
    (case_of(Gain, KeepsColumns), "called_again", "inputs or columns: keep nothing"),
    (case_of(Gain, KeepsTheFirstInput), "called_again", "with other inputs"),
    (case_of(Gain, Detaches), "differentiable", "create_graph=True, .*without detach"),
    (case_of(Gain, WithoutGraph), "jac_mat_prod", "derivative of _jac_t_mat_prod by its columns"),
    (case_of(Gain, ReadsTheInputUnchecked), "changed_since", "use view.input, not view.inputs"),
    (case_of(Gain, Wrong), "non_contiguous_columns", "2 times .* V = 1 "),
    (case_of(Gain, WrongForManyColumns), "non_contiguous_columns", "2 times .* V = 7 "),
    (case_of(Gain, WrongForOneSample), "one_sample", "2 times .* N = 1"),
    (case_of(Gain, WrongForManySamples), "other_inputs", "2 times .* N = 5"),
    (case_of(Gain, RaisesForNone), "empty_batch", "ZeroDivisionError.* N = 0"),
    (case_of(Sigmoid, Overflows), "large_inputs", "finite.* 10,000 times"),
    (case_of(Settings, ReadsTheBufferOfNow), "changed_since", "The module was changed"),
    (case_of(Settings, ReadsTheSettingOfNow), "changed_since", "The module was changed"),
    (of_two(Power, WrongSecondDerivativeOfOne), "second_derivative_mat_prod", "of 1 columns"),
    (turned(ForgottenAxis), "mixes_samples", "on axis 0 of the output, as batch_axis"),
    (case_of(Both, LastOnly), "accepts", "params leaves out 'first', which a Both has"),
]


@pytest.mark.parametrize(
    ("case", "check", "message"), FAULTS, ids=[f"{c.rule.__name__}-{n}" for c, n, _ in FAULTS]
)
def test_the_fault_is_named(case: RuleCase, check: str, message: str) -> None:
    (found,) = check_case(case, [check])
    assert found.status == "failed"
    assert_matches(message, found.message)
    Leak.seen.clear()
    KeepsTheFirstInput.first.clear()


FIRST = {
    WrongSign: "jac_t_mat_prod",
    ForgottenGroup: "affine_form",
    WrongSecondDerivative: "second_derivative",
    FalseZeroHessian: "hessian_is_zero",
    State: "accepts",
    UndeclaredMixing: "mixes_samples",
}


@pytest.mark.parametrize(
    "case", {c.rule: c for c, _, _ in FAULTS}.values(), ids=lambda c: c.rule.__name__
)
def test_the_first_cause_is_first(case: RuleCase) -> None:
    """Only causes fail, and what rests on them names them."""
    results = {result.check: result for result in check_case(case)}
    failed = [name for name, result in results.items() if result.status == "failed"]
    assert failed
    assert len(failed) <= 3
    assert FIRST.get(case.rule, failed[0]) == failed[0]
    rest = [result for result in results.values() if result.status == "not judged"]
    assert {result.message for result in rest} <= {f"not judged: {name} failed" for name in failed}
    assert not any(result.ok for result in rest)
    Leak.seen.clear()
    KeepsTheFirstInput.first.clear()


def assert_matches(pattern: str, text: str) -> None:
    import re

    assert re.search(pattern, text), text


def partly_frozen_layer() -> Module:
    layer = Grouped()
    layer.bias.requires_grad_(False)
    return layer


class CannotBeCopied(Module):
    """It holds what neither pickle nor deepcopy takes."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class CannotBeCopiedRule(SlopeIsANumber):
    module_types = (CannotBeCopied,)


class Draws(Module):
    """It draws other numbers in single precision than in double."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.randn_like(x)


class DrawsRule(ElementwiseRule):
    module_types = (Draws,)
    hessian_is_zero = True

    def derivative(self, view: View) -> Tensor:
        return view.output / view.input


class Overwrites(Module):
    """Changes what it receives, without an attribute that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0).tanh_()


class OverwritesRule(ElementwiseRule):
    module_types = (Overwrites,)

    def derivative(self, view: View) -> Tensor:
        return 2 * (1 - view.output.square())


class AlsoSquares(Gain):
    """The second output does not depend on the weight."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x.square()


class AlsoSquaresRule(ParametricRule):
    module_types = (AlsoSquares,)
    params = ("weight",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * (2 * view.input if view.index else view.parameter("weight"))

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return mat * (0.0 * view.input if view.index else view.input)


class Rows(Module):
    """Looks rows up: what it receives is not differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(5, 4))

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index]


class RowsRule(ParametricRule):
    module_types = (Rows,)
    params = ("weight",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> None:
        return None

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return nn.functional.one_hot(view.input, 5).to(mat)[:, :, None] * mat[:, :, None]


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    "case",
    [
        case_of(Both, BothRule),
        case_of(Gain, GainRule),
        case_of(Overwrites, OverwritesRule),
        case_of(AlsoSquares, AlsoSquaresRule, output_nr=1),
        RuleCase(Rows, lambda n: torch.randint(5, (n,)), rule=RowsRule),
        case_of(Gain, OwnFormRule),
        case_of(Grouped, GroupedRule),
        case_of(Cube, CubeRule),
        of_two(Power, PowerRule),
        case_of(Score, ScoreRule),
        case_of(Doubled, SlopeIsANumber),
        turned(TurnedRule),
        case_of(partly_frozen_layer, GroupedRule),
        case_of(CannotBeCopied, CannotBeCopiedRule),
        case_of(Draws, DrawsRule),
    ],
)
def test_right_rules_pass(case: RuleCase) -> None:
    results = check_case(case)
    assert [r for r in results if not r.ok] == []
    assert len(results) >= 25


def test_a_right_rule_of_a_layer_that_mixes_samples_passes() -> None:
    """Products with the matrices of the whole loss are compared, the rest is refused."""
    results = check_case(case_of(Centre, CentreRule))
    assert {r.check: r.status for r in results} == {
        "mixes_samples": "passed",
        "mixing_is_refused": "passed",
        "other_mode": "passed",
    }


def test_unnecessary_work_is_not_promised() -> None:
    names = {result.check for result in check_case(case_of(Gain, GainRule))}
    assert "hessian_is_diagonal" not in names
    assert "affine_form" not in names
    assert "hessian_is_zero" in names


@pytest.mark.parametrize("strides", [True, False])
def test_comparer_knows_simple_mistakes(strides: bool) -> None:
    from backpack_core.testing.compare import CheckFailure, close

    expected = torch.arange(1.0, 5.0).reshape(2, 2)
    found = (2 * expected).T.contiguous().T if strides else 2 * expected
    with pytest.raises(CheckFailure, match="2 times the right value"):
        close(found, expected, "x", 1e-10)
    with pytest.raises(CheckFailure, match="finite"):
        close(expected / 0, expected, "x", 1e-10)
    with pytest.raises(CheckFailure, match="shape"):
        close(expected.sum(0), expected, "x", 1e-10)
