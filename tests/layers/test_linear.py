from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_core.errors import UnsupportedError
from backpack_layers.linear import LinearRule
from tests.layers.execution import check_rule, record


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (3, 5, 4), (2, 3, 2, 4)], ids=str)
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    check_rule(LinearRule(), record(nn.Linear(4, 3, bias=bias), torch.randn(shape).double()))


def test_views_of_flat_inputs() -> None:
    run = record(nn.Linear(4, 3), torch.randn(5, 4))
    assert LinearRule().affine_input(run.view).data_ptr() == run.view.input.data_ptr()


def test_no_batch_axis() -> None:
    with pytest.raises(UnsupportedError, match="no batch axis"):
        LinearRule().check(record(nn.Linear(4, 3), torch.randn(4)).view)
