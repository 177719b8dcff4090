"""A parameter that a module and a function use, where a quantity has no part for the function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_secondorder.kfra import KFRA


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x), self.first.weight)


@pytest.mark.parametrize("fail_mode", ["autodiff", "warning", "silent"])
def test_half_of_a_quantity_is_never_stored(fail_mode: Any) -> None:
    model, lossfunc = extend(Tied()), extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.randn(4, 3))
    message = r"first\.weight.* is used by the operation .*KFRA .*cannot be computed"
    with backpack(KFRA(fail_mode=fail_mode)), pytest.raises(UnsupportedError, match=message):
        loss.backward()
    assert not hasattr(model.first.weight, "kfra")
