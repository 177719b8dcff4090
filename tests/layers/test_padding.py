from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_core.errors import UnsupportedError
from backpack_layers.padding import ConstantPadRule, CopyPadRule
from tests.layers.execution import check_rule, record

SIZES = {1: (5,), 2: (4, 5), 3: (3, 4, 5)}
PADS = {1: (2, 1), 2: (2, 1, 0, 3), 3: (2, 1, 0, 3, 1, 2)}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["Constant", "Zero", "Reflection", "Replication", "Circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_padding(dims: int, kind: str, batch: int) -> None:
    rule = ConstantPadRule() if kind in {"Constant", "Zero"} else CopyPadRule()
    value = (1.5,) if kind == "Constant" else ()
    x = torch.randn(batch, 2, *SIZES[dims]).double()
    for padding in (1, PADS[dims]):
        module = getattr(nn, f"{kind}Pad{dims}d")(padding, *value)
        check_rule(rule, record(module, x))


def test_negative_padding_cuts() -> None:
    x = torch.randn(2, 3, 4, 5).double()
    check_rule(ConstantPadRule(), record(nn.ConstantPad2d((-1, 2, 1, -2), 0.5), x))


def test_no_channels() -> None:
    check_rule(CopyPadRule(), record(nn.ReflectionPad1d(1), torch.randn(2, 4).double()))


def test_batch_axis() -> None:
    with pytest.raises(UnsupportedError, match="batch axis"):
        ConstantPadRule().check(record(nn.ZeroPad2d(1), torch.randn(3, 4)).view)
