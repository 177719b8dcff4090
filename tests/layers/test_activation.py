from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_core.errors import OverwrittenInputError
from backpack_core.rules import ElementwiseRule
from backpack_layers import activation as rules
from tests.layers.execution import TOLERANCE, check_rule, close, pullback, record

# torch itself rounds some constants to single precision: 1/6 in Hardsigmoid, and 1/alpha in CELU,
# for which a power of two is exact.
COARSE = 1e-7

CASES: list[tuple[type[ElementwiseRule], nn.Module]] = [
    (rules.ReLURule, nn.ReLU()),
    (rules.HardtanhRule, nn.ReLU6()),
    (rules.HardtanhRule, nn.Hardtanh(-0.5, 1.5)),
    (rules.LeakyReLURule, nn.LeakyReLU(0.2)),
    (rules.LeakyReLURule, nn.LeakyReLU(-0.2)),
    (rules.RReLURule, nn.RReLU().eval()),
    (rules.ThresholdRule, nn.Threshold(0.5, -1.0)),
    (rules.ThresholdRule, nn.Threshold(0.5, 2.0)),
    (rules.ShrinkRule, nn.Softshrink(0.5)),
    (rules.ShrinkRule, nn.Hardshrink(1.0)),
    (rules.SigmoidRule, nn.Sigmoid()),
    (rules.TanhRule, nn.Tanh()),
    (rules.ELURule, nn.ELU(0.7)),
    (rules.ELURule, nn.ELU(-0.7)),
    (rules.ELURule, nn.CELU(0.5)),
    (rules.ELURule, nn.CELU(-0.5)),
    (rules.ELURule, nn.SELU()),
    (rules.GELURule, nn.GELU()),
    (rules.GELURule, nn.GELU("tanh")),
    (rules.SiLURule, nn.SiLU()),
    (rules.MishRule, nn.Mish()),
    (rules.SoftplusRule, nn.Softplus()),
    (rules.SoftplusRule, nn.Softplus(2.0, 3.0)),
    (rules.SoftsignRule, nn.Softsign()),
    (rules.TanhshrinkRule, nn.Tanhshrink()),
    (rules.LogSigmoidRule, nn.LogSigmoid()),
    (rules.HardsigmoidRule, nn.Hardsigmoid()),
    (rules.HardswishRule, nn.Hardswish()),
    (rules.PReLURule, nn.PReLU()),
    (rules.PReLURule, nn.PReLU(4)),
]
# Torch can work in place, and the output says enough.
IN_PLACE: list[tuple[type[ElementwiseRule], nn.Module]] = [
    (rules.ReLURule, nn.ReLU(inplace=True)),
    (rules.HardtanhRule, nn.Hardtanh(-0.5, 1.5, inplace=True)),
    (rules.HardtanhRule, nn.ReLU6(inplace=True)),
    (rules.LeakyReLURule, nn.LeakyReLU(0.2, inplace=True)),
    (rules.RReLURule, nn.RReLU(inplace=True).eval()),
    (rules.ThresholdRule, nn.Threshold(0.5, -1.0, inplace=True)),
    (rules.ELURule, nn.ELU(0.7, inplace=True)),
    (rules.ELURule, nn.CELU(0.5, inplace=True)),
    (rules.ELURule, nn.SELU(inplace=True)),
]
NEED_THE_INPUT: list[tuple[type[ElementwiseRule], nn.Module]] = [
    (rules.SiLURule, nn.SiLU(inplace=True)),
    (rules.MishRule, nn.Mish(inplace=True)),
    (rules.HardswishRule, nn.Hardswish(inplace=True)),
    (rules.HardsigmoidRule, nn.Hardsigmoid(inplace=True)),
    (rules.ThresholdRule, nn.Threshold(0.5, 2.0, inplace=True)),
    (rules.RReLURule, nn.RReLU(inplace=True)),
]
KINKS = [0.0, 0.5, -0.5, 1.0, 1.5, 3.0, -3.0, 6.0]


@pytest.mark.parametrize("shape", [(1, 4), (3, 4, 2, 2), (5,)], ids=str)
@pytest.mark.parametrize(("rule", "module"), CASES, ids=lambda case: str(case))
def test_activation(rule: type[ElementwiseRule], module: nn.Module, shape: tuple[int, ...]) -> None:
    if len(shape) == 1 and isinstance(module, nn.PReLU) and module.num_parameters > 1:
        pytest.skip("one slope for each channel needs channels")
    tolerance = COARSE if isinstance(module, nn.Hardsigmoid) else TOLERANCE
    check_rule(rule(), record(module, 3 * torch.randn(shape).double()), tolerance=tolerance)


@pytest.mark.parametrize(("rule", "module"), IN_PLACE, ids=lambda case: str(case))
def test_in_place(rule: type[ElementwiseRule], module: nn.Module) -> None:
    check_rule(rule(), record(module, 3 * torch.randn(3, 4).double()))


@pytest.mark.parametrize(("rule", "module"), [*CASES, *IN_PLACE], ids=lambda case: str(case))
def test_kinks(rule: type[ElementwiseRule], module: nn.Module) -> None:
    if isinstance(module, nn.PReLU):
        module = nn.PReLU(1)
    run = record(module, torch.tensor([KINKS]).double())
    one = torch.ones(1, *run.output.shape).double()
    tolerance = COARSE if isinstance(module, nn.Hardsigmoid) else TOLERANCE
    found = rule().jac_t_mat_prod(run.call, one)[0]
    close(found, pullback(run, run.leaf, one), "derivative", tolerance)


@pytest.mark.parametrize(("rule", "module"), NEED_THE_INPUT, ids=lambda case: str(case))
def test_overwritten_input(rule: type[ElementwiseRule], module: nn.Module) -> None:
    with pytest.raises(OverwrittenInputError):
        rule().derivative(record(module, torch.randn(3, 4).double()).call)


def test_rrelu_in_train_mode() -> None:
    check_rule(rules.RReLURule(), record(nn.RReLU(), torch.randn(3, 4).double()))
    with pytest.raises(OverwrittenInputError, match="random slopes"):
        rules.RReLURule().derivative(record(nn.RReLU(), torch.zeros(3, 4).double()).call)
