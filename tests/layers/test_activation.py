from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import OverwrittenInputError
from backpack_core.extensions import Jacobians
from backpack_core.record.view import View
from backpack_layers import activation as curved
from backpack_layers import piecewise_linear as linear
from backpack_products.elementwise import ElementwiseRule
from backpack_secondorder.outputs import SumOutputs
from tests.layers.execution import TOLERANCE, check_rule, close, pullback, record

# torch itself rounds some constants to single precision: 1/6 in Hardsigmoid, and 1/alpha in CELU,
# for which a power of two is exact.
COARSE = 1e-7

CASES: list[tuple[type[ElementwiseRule], nn.Module]] = [
    (linear.ReLURule, nn.ReLU()),
    (linear.HardtanhRule, nn.ReLU6()),
    (linear.HardtanhRule, nn.Hardtanh(-0.5, 1.5)),
    (linear.LeakyReLURule, nn.LeakyReLU(0.2)),
    (linear.LeakyReLURule, nn.LeakyReLU(-0.2)),
    (linear.RReLURule, nn.RReLU().eval()),
    (linear.ThresholdRule, nn.Threshold(0.5, -1.0)),
    (linear.ThresholdRule, nn.Threshold(0.5, 2.0)),
    (linear.ShrinkRule, nn.Softshrink(0.5)),
    (linear.ShrinkRule, nn.Hardshrink(1.0)),
    (curved.SigmoidRule, nn.Sigmoid()),
    (curved.TanhRule, nn.Tanh()),
    (curved.ELURule, nn.ELU(0.7)),
    (curved.ELURule, nn.ELU(-0.7)),
    (curved.ELURule, nn.CELU(0.5)),
    (curved.ELURule, nn.CELU(-0.5)),
    (curved.ELURule, nn.SELU()),
    (curved.GELURule, nn.GELU()),
    (curved.GELURule, nn.GELU("tanh")),
    (curved.SiLURule, nn.SiLU()),
    (curved.MishRule, nn.Mish()),
    (curved.SoftplusRule, nn.Softplus()),
    (curved.SoftplusRule, nn.Softplus(2.0, 3.0)),
    (curved.SoftsignRule, nn.Softsign()),
    (curved.TanhshrinkRule, nn.Tanhshrink()),
    (curved.LogSigmoidRule, nn.LogSigmoid()),
    (linear.HardsigmoidRule, nn.Hardsigmoid()),
    (curved.HardswishRule, nn.Hardswish()),
    (linear.PReLURule, nn.PReLU()),
]
# Torch can work in place, and the output says enough.
IN_PLACE: list[tuple[type[ElementwiseRule], nn.Module]] = [
    (linear.ReLURule, nn.ReLU(inplace=True)),
    (linear.HardtanhRule, nn.Hardtanh(-0.5, 1.5, inplace=True)),
    (linear.HardtanhRule, nn.ReLU6(inplace=True)),
    (linear.LeakyReLURule, nn.LeakyReLU(0.2, inplace=True)),
    (linear.RReLURule, nn.RReLU(inplace=True).eval()),
    (linear.ThresholdRule, nn.Threshold(0.5, -1.0, inplace=True)),
    (curved.ELURule, nn.ELU(0.7, inplace=True)),
    (curved.ELURule, nn.CELU(0.5, inplace=True)),
    (curved.ELURule, nn.SELU(inplace=True)),
]
NEED_THE_INPUT: list[tuple[type[ElementwiseRule], nn.Module]] = [
    (curved.SiLURule, nn.SiLU(inplace=True)),
    (curved.MishRule, nn.Mish(inplace=True)),
    (curved.HardswishRule, nn.Hardswish(inplace=True)),
    (linear.HardsigmoidRule, nn.Hardsigmoid(inplace=True)),
    (linear.ThresholdRule, nn.Threshold(0.5, 2.0, inplace=True)),
    (linear.RReLURule, nn.RReLU(inplace=True)),
]
KINKS = [0.0, 0.5, -0.5, 1.0, 1.5, 3.0, -3.0, 6.0]


@pytest.mark.parametrize("shape", [(1, 4), (3, 4, 2, 2), (5,)], ids=str)
@pytest.mark.parametrize(("rule", "module"), CASES, ids=lambda case: str(case))
def test_activation(rule: type[ElementwiseRule], module: nn.Module, shape: tuple[int, ...]) -> None:
    coarse = isinstance(module, nn.Hardsigmoid)  # it has no second derivative in torch, either
    run = record(module, 3 * torch.randn(shape).double())
    check_rule(rule(), run, twice=not coarse, tolerance=COARSE if coarse else TOLERANCE)


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (3, 4, 2)], ids=str)
def test_slopes_for_channels(shape: tuple[int, ...]) -> None:
    check_rule(linear.PReLURule(), record(nn.PReLU(4), torch.randn(shape).double()))


@pytest.mark.parametrize(("rule", "module"), IN_PLACE, ids=lambda case: str(case))
def test_in_place(rule: type[ElementwiseRule], module: nn.Module) -> None:
    check_rule(rule(), record(module, 3 * torch.randn(3, 4).double()))


@pytest.mark.parametrize(("rule", "module"), [*CASES, *IN_PLACE], ids=lambda case: str(case))
def test_kinks(rule: type[ElementwiseRule], module: nn.Module) -> None:
    run = record(module, torch.tensor([KINKS]).double())
    one = torch.ones(1, *run.output.shape).double()
    tolerance = COARSE if isinstance(module, nn.Hardsigmoid) else TOLERANCE
    with torch.no_grad():  # as in a backward pass
        found = rule().jac_t_mat_prod(run.view, one)[0]
    close(found, pullback(run, run.leaf, one), "derivative", tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [nn.ELU(0.7), nn.CELU(0.5), nn.SELU()], ids=str)
def test_slopes_far_below_zero(module: nn.Module, dtype: torch.dtype) -> None:
    """The output is a constant there, up to rounding, but the slope is not zero."""
    run = record(module, torch.tensor([[-5.0, -12.0, -20.0]]).to(dtype))
    one = torch.ones(1, 1, 3, dtype=dtype)
    found = curved.ELURule().jac_t_mat_prod(run.view, one)[0]
    expected = pullback(run, run.leaf, one)
    assert found is not None
    assert torch.allclose(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize(("rule", "module"), NEED_THE_INPUT, ids=lambda case: str(case))
def test_overwritten_input(rule: type[ElementwiseRule], module: nn.Module) -> None:
    with pytest.raises(OverwrittenInputError):
        rule().derivative(record(module, torch.randn(3, 4).double()).view)


def test_rrelu_in_train_mode() -> None:
    check_rule(linear.RReLURule(), record(nn.RReLU(), torch.randn(3, 4).double()))
    with pytest.raises(OverwrittenInputError, match="random slopes"):
        linear.RReLURule().derivative(record(nn.RReLU(), torch.zeros(3, 4).double()).view)


class HalfReLU(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class HalfReLURule(linear.ReLURule):
    module_types = (HalfReLU,)

    def derivative(self, view: View) -> Tensor:
        return 0.5 * super().derivative(view)


def test_a_rule_derived_from_a_quick_one_has_its_own_formula() -> None:
    check_rule(HalfReLURule(), record(HalfReLU(), torch.randn(3, 4)))


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        (curved.SigmoidRule, nn.Sigmoid()),
        (curved.TanhRule, nn.Tanh()),
        (linear.ReLURule, nn.ReLU()),
    ],
)
def test_a_subclass_with_another_derivative(kind: type[ElementwiseRule], module: nn.Module) -> None:
    """What torch does in one kernel is no longer what it says."""

    class Doubled(kind):  # type: ignore[misc, valid-type]
        def derivative(self, view: View) -> Tensor:
            return 2 * kind().derivative(view)

    view, mat = record(module, torch.randn(4, 3)).view, torch.randn(2, 4, 3)
    (plain,), (doubled,) = kind().jac_t_mat_prod(view, mat), Doubled().jac_t_mat_prod(view, mat)
    close(doubled, 2 * plain, "doubled")


@pytest.mark.parametrize(
    "module",
    [nn.Hardtanh(), nn.ReLU6(), nn.Hardshrink(), nn.Softshrink(), nn.Threshold(0.0, 0.0)],
    ids=lambda module: type(module).__name__,
)
def test_slopes_where_the_input_is_not_a_number(module: nn.Module) -> None:
    """As in autograd; a zero would hide that the number is none."""
    first = nn.Linear(1, 1)
    model, outputs = extend(nn.Sequential(first, module)), extend(SumOutputs())
    x = torch.tensor([[float("nan")], [0.3]])
    with backpack(Jacobians()):
        outputs(model(x)).backward()
    found = first.bias.jacobians.flatten()
    for row, value in zip(x, found, strict=True):
        (expected,) = torch.autograd.grad(model(row[None]).sum(), first.bias)
        assert value == expected
