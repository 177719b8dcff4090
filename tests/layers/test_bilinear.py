"""The bilinear rule against autograd."""

from __future__ import annotations

import pytest
from handmade import check_input, check_parameters, draw, make_view
from torch import nn

from backpack_core.errors import UnsupportedError
from backpack_layers.bilinear import BilinearRule

BATCHES = pytest.mark.parametrize("batch", [1, 3])


@BATCHES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("extra", [(), (2,), (2, 3)])
def test_bilinear(batch: int, bias: bool, extra: tuple[int, ...]) -> None:
    rule, module = BilinearRule(), nn.Bilinear(3, 2, 4, bias=bias).double()
    view = make_view(module, draw(batch, *extra, 3), draw(batch, *extra, 2))
    check_input(rule, view)
    check_parameters(rule, view)


def test_bilinear_of_one_tensor_twice_and_keywords() -> None:
    x = draw(3, 4)
    check_input(BilinearRule(), make_view(nn.Bilinear(4, 4, 2).double(), x, x))
    swapped = make_view(nn.Bilinear(3, 2, 4).double(), input2=draw(2, 2), input1=draw(2, 3))
    check_input(BilinearRule(), swapped)
    check_parameters(BilinearRule(), swapped)


def test_bilinear_refuses_inputs_without_batch_axis() -> None:
    with pytest.raises(UnsupportedError, match="without a batch axis"):
        BilinearRule().check(make_view(nn.Bilinear(3, 2, 4).double(), draw(3), draw(2)))
