"""Activations, softmax and gated units."""

from __future__ import annotations

from torch import nn

from backpack_core.testing import RuleCase, Tolerances
from tests.conformance.layer import layer

FACTORIES = [
    lambda: nn.ReLU(),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.ReLU6(),
    lambda: nn.LeakyReLU(0.2),
    lambda: nn.LeakyReLU(0.2, inplace=True),
    lambda: nn.RReLU().eval(),
    lambda: nn.Hardtanh(-0.5, 0.7),
    lambda: nn.Threshold(0.1, -0.3),
    lambda: nn.Softshrink(0.3),
    lambda: nn.Hardshrink(0.3),
    lambda: nn.Hardswish(),
    lambda: nn.Sigmoid(),
    lambda: nn.Tanh(),
    lambda: nn.ELU(0.7),
    lambda: nn.ELU(inplace=True),
    lambda: nn.SELU(),
    lambda: nn.GELU(),
    lambda: nn.GELU("tanh"),
    lambda: nn.SiLU(),
    lambda: nn.Mish(),
    lambda: nn.Softplus(),
    lambda: nn.Softplus(beta=2.0, threshold=1.0),
    lambda: nn.Softsign(),
    lambda: nn.Tanhshrink(),
    lambda: nn.LogSigmoid(),
    lambda: nn.PReLU(),
]
# Torch computes their derivatives with a factor in single precision, whatever the dtype.
ROUNDED = Tolerances(float64=1e-7)

CASES: list[RuleCase] = [
    *(layer(factory, 4) for factory in FACTORIES),
    layer(lambda: nn.Hardsigmoid(), 4, tolerances=ROUNDED, twice_differentiable=False),
    layer(lambda: nn.CELU(0.7), 4, tolerances=ROUNDED),
    layer(lambda: nn.SiLU(inplace=True), 4, overwrites_input=True),
    layer(lambda: nn.RReLU(), 4, name="RReLU, training"),
    layer(lambda: nn.Tanh(), 2, 1, 2, name="Tanh, axes"),
    layer(lambda: nn.PReLU(2), 2, 2),
    layer(lambda: nn.Softmax(dim=1), 4),
    layer(lambda: nn.Softmax(dim=-2), 2, 2),
    layer(lambda: nn.Softmin(dim=1), 4),
    layer(lambda: nn.Softmax2d(), 2, 2, 1),
    layer(lambda: nn.LogSoftmax(dim=1), 4),
    layer(lambda: nn.GLU(), 4),
    layer(lambda: nn.GLU(dim=1), 4, 2, name="GLU, axis 1"),
]
