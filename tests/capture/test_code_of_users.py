"""Rules that call functions of users, which may depend on anything: they are not recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact
from backpack_layers.autodiff_loss import AutodiffLoss
from tests import oracle

SCALE = {"of": 1.0}


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * _losses(output, target)


def _losses(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def _loss(scale: float, target: Tensor, output: Tensor) -> Tensor:
    return scale * _losses(output, target).mean()


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "variable": (
        lambda: lambda output, target: SCALE["of"] * _losses(output, target),
        lambda function: SCALE.update(of=3.0),
    ),
    "module": (_Scaled, lambda function: setattr(function, "scale", 3.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_function_of_a_loss_reads_may_change(name: str) -> None:
    SCALE["of"] = 1.0
    make, change = CASES[name]
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    lossfunc = extend(AutodiffLoss(make()))
    repeated = 0
    for number in range(26):
        x, y = torch.randn(4, 3), torch.randint(3, (4,))
        if number == 20:
            change(lossfunc.function)
        with backpack(DiagGGNExact()) as block:
            lossfunc(model(x), y).backward()
        repeated += block._history["repeated a recording"]
        parameters, scale = [*model.parameters()], 3.0 if number >= 20 else 1.0
        scaled = partial(_loss, scale, y)
        found = oracle.ggn_diagonals(model, scaled, [x], parameters)
        for parameter, right in zip(parameters, found, strict=True):
            ours: Tensor = parameter.diag_ggn_exact  # type: ignore[attr-defined]
            oracle.assert_close(ours, right.sum(0))
    assert not repeated
