from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_core.contract.rules import LayerRule
from backpack_layers.softmax import GLURule, LogSoftmaxRule, SoftmaxRule
from tests.layers.execution import check_rule, record

CASES: list[tuple[type[LayerRule], nn.Module, tuple[int, ...]]] = [
    (SoftmaxRule, nn.Softmax(1), (4,)),
    (SoftmaxRule, nn.Softmax(-1), (4, 3)),
    (SoftmaxRule, nn.Softmax(), (4, 3, 2)),
    (SoftmaxRule, nn.Softmin(1), (4, 3)),
    (SoftmaxRule, nn.Softmax2d(), (4, 3, 2)),
    (LogSoftmaxRule, nn.LogSoftmax(2), (4, 3)),
    (GLURule, nn.GLU(), (4,)),
    (GLURule, nn.GLU(1), (4, 3)),
]


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("rule", "module", "shape"), CASES, ids=lambda case: str(case))
def test_softmax(
    rule: type[LayerRule], module: nn.Module, shape: tuple[int, ...], batch: int
) -> None:
    check_rule(rule(), record(module, torch.randn(batch, *shape).double()))


@pytest.mark.parametrize(
    ("rule", "module"),
    [
        (SoftmaxRule, nn.Softmax(0)),
        (SoftmaxRule, nn.Softmin(-3)),
        (SoftmaxRule, nn.Softmax2d()),
        (LogSoftmaxRule, nn.LogSoftmax(0)),
        (GLURule, nn.GLU(0)),
    ],
    ids=lambda case: str(case),
)
def test_samples_mix(rule: type[LayerRule], module: nn.Module) -> None:
    assert rule().mixes_samples(record(module, torch.randn(4, 3, 2)).view)
