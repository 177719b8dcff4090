"""A bound on the norm of all parameters is no bound where some are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchGrad, ClippedSumGrad
from tests.cases import Net, classification


class Shift(nn.Module):
    """A module without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        """Add the shift."""
        return x + self.shift


def _half_extended() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    extend(model[1])
    return model


def _bare() -> nn.Module:
    free = nn.Parameter(torch.randn(3, 3))
    return extend(Net(lambda net, x: net.a(F.linear(x, free)), a=nn.Linear(3, 3)))


@pytest.mark.parametrize("make", [_half_extended, _bare])
def test_a_bound_that_would_leave_a_parameter_out(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    lossfunc = extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.tensor([0, 1, 2, 0]))
    with (
        pytest.raises(UnsupportedError, match=r"outside any.* ClippedSumGrad .*cannot be computed"),
        backpack(ClippedSumGrad(1.0)),
    ):
        loss.backward()


@pytest.mark.parametrize("mode", ["silent", "warning"])
def test_a_bound_that_would_leave_a_module_out(mode: str) -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    with pytest.raises(UnsupportedError, match="Shift '1', and fail_mode is"):
        problem.run(ClippedSumGrad(1.0, fail_mode=mode))


@pytest.mark.filterwarnings("ignore::backpack_core.errors.UncoveredParameterWarning")
def test_others_leave_it_out() -> None:
    model = _bare()
    loss = extend(nn.CrossEntropyLoss())(model(torch.randn(4, 3)), torch.tensor([0, 1, 2, 0]))
    with backpack(BatchGrad()):
        loss.backward()
    assert hasattr(model.a.weight, "grad_batch")
