"""The bilinear rule and the parametric activation against autograd."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_equal, check_adjoint, check_input, check_parameters, draw, make_call
from torch import nn

from backpack_core.errors import UnsupportedError
from backpack_layers.bilinear import BilinearRule
from backpack_layers.prelu import PReLURule

BATCHES = pytest.mark.parametrize("batch", [1, 3])


@BATCHES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("extra", [(), (2,), (2, 3)])
def test_bilinear(batch: int, bias: bool, extra: tuple[int, ...]) -> None:
    rule, module = BilinearRule(), nn.Bilinear(3, 2, 4, bias=bias).double()
    call = make_call(module, draw(batch, *extra, 3), draw(batch, *extra, 2))
    check_input(rule, call)
    check_parameters(rule, call)


def test_bilinear_of_one_tensor_twice_and_keywords() -> None:
    x = draw(3, 4)
    check_input(BilinearRule(), make_call(nn.Bilinear(4, 4, 2).double(), x, x))
    swapped = make_call(nn.Bilinear(3, 2, 4).double(), input2=draw(2, 2), input1=draw(2, 3))
    check_input(BilinearRule(), swapped)
    check_parameters(BilinearRule(), swapped)


def test_bilinear_refuses_inputs_without_batch_axis() -> None:
    with pytest.raises(UnsupportedError, match="without a batch axis"):
        BilinearRule().check(make_call(nn.Bilinear(3, 2, 4).double(), draw(3), draw(2)))


@BATCHES
@pytest.mark.parametrize("shape", [(), (4,), (4, 2, 3)])
@pytest.mark.parametrize("shared", [True, False])
def test_prelu(batch: int, shape: tuple[int, ...], shared: bool) -> None:
    if not shape and not shared:
        return
    rule, module = PReLURule(), nn.PReLU(1 if shared else 4).double()
    with torch.no_grad():
        module.weight.normal_()
    call = make_call(module, draw(batch, *shape))
    check_input(rule, call)
    check_parameters(rule, call)
    check_adjoint(rule, call, rule.jac_mat_prod)
    assert not bool(rule.second_derivative(call).any())


def test_prelu_parameter_jacobian_is_the_transpose() -> None:
    rule, call = PReLURule(), make_call(nn.PReLU(4).double(), draw(3, 4, 2))
    theta, mat = draw(2, 4), draw(2, 3, 4, 2)
    left = (rule.param_jac_mat_prod(call, "weight", theta) * mat).sum((1, 2, 3))
    right = (rule.param_jac_t_mat_prod(call, "weight", mat) * theta.unsqueeze(1)).sum((1, 2))
    assert_equal(left, right)
