"""The derivatives' methods against Jacobians and Hessians by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import disable, extend
from backpack.core.derivatives import DERIVATIVES
from backpack.core.derivatives.basederivatives import BaseParameterDerivatives
from backpack.core.derivatives.convnd import weight_jac_t_save_memory
from backpack.core.derivatives.elementwise import ElementwiseDerivatives
from backpack.custom_module.pad import Pad
from backpack.custom_module.permute import Permute
from backpack.custom_module.scale_module import ScaleModule
from backpack.custom_module.slicing import Slicing
from backpack.utils import conv, conv_transpose
from backpack.utils import linear as linear_utils
from backpack_core.errors import SampleMixingError, StoredIOError
from tests.oracle import assert_close

N, V = 3, 2

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LinearDerivatives": (lambda: nn.Linear(4, 3), (4,)),
    "Conv1DDerivatives": (lambda: nn.Conv1d(2, 4, 2, groups=2), (2, 5)),
    "Conv2DDerivatives": (lambda: nn.Conv2d(2, 3, 2, stride=2, padding=1), (2, 4, 4)),
    "Conv3DDerivatives": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "ConvTranspose1DDerivatives": (lambda: nn.ConvTranspose1d(2, 2, 2), (2, 3)),
    "ConvTranspose2DDerivatives": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 3)),
    "ConvTranspose3DDerivatives": (lambda: nn.ConvTranspose3d(1, 2, 2), (1, 2, 2, 2)),
    "BatchNormNdDerivatives": (lambda: nn.BatchNorm1d(4).eval(), (4,)),
    "RNNDerivatives": (lambda: nn.RNN(3, 2, batch_first=True), (4, 3)),
    "LSTMDerivatives": (lambda: nn.LSTM(3, 2, batch_first=True), (4, 3)),
    "ReLUDerivatives": (nn.ReLU, (4,)),
    "SigmoidDerivatives": (nn.Sigmoid, (4,)),
    "TanhDerivatives": (nn.Tanh, (4,)),
    "ELUDerivatives": (nn.ELU, (4,)),
    "SELUDerivatives": (nn.SELU, (4,)),
    "LeakyReLUDerivatives": (nn.LeakyReLU, (4,)),
    "LogSigmoidDerivatives": (nn.LogSigmoid, (4,)),
    "DropoutDerivatives": (nn.Dropout, (4,)),
    "FlattenDerivatives": (nn.Flatten, (2, 2)),
    "MaxPool1DDerivatives": (lambda: nn.MaxPool1d(2), (2, 4)),
    "MaxPool2DDerivatives": (lambda: nn.MaxPool2d(2), (2, 4, 4)),
    "AvgPool2DDerivatives": (lambda: nn.AvgPool2d(2), (2, 4, 4)),
    "AvgPool3DDerivatives": (lambda: nn.AvgPool3d(2), (1, 4, 2, 2)),
    "AdaptiveAvgPool2dDerivatives": (lambda: nn.AdaptiveAvgPool2d(2), (2, 4, 4)),
    "ZeroPad2dDerivatives": (lambda: nn.ZeroPad2d(1), (1, 2, 2)),
    "ScaleModuleDerivatives": (lambda: ScaleModule(0.3), (4,)),
    "SlicingDerivatives": (lambda: Slicing((slice(None), 1)), (4, 2)),
    "PadDerivatives": (lambda: Pad((1, 2)), (4,)),
    "PermuteDerivatives": (lambda: Permute(0, 2, 1), (4, 2)),
}
RECURRENT = ("RNNDerivatives", "LSTMDerivatives")


class Case:
    """A layer after its forward pass, with its Jacobian."""

    def __init__(self, name: str) -> None:
        build, shape = LAYERS[name]
        self.derivatives: Any = DERIVATIVES[name]()
        self.module = extend(build())
        self.x = torch.randn(N, *shape, requires_grad=True)
        self.y = self.forward(self.x, record=True)
        jacobian = torch.autograd.functional.jacobian(self.forward, self.x)
        self.jacobian = jacobian.reshape(self.y.numel(), self.x.numel())
        self.out = torch.randn(V, *self.y.shape)
        self.inp = torch.randn(V, *self.x.shape)

    def forward(self, x: Tensor, record: bool = False) -> Tensor:
        torch.manual_seed(1)  # dropout
        if record:
            result = self.module(x)
        else:
            with disable():
                result = self.module(x)
        return result[0] if isinstance(result, tuple) else result


@pytest.fixture(params=LAYERS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_input_jacobians(case: Case) -> None:
    d, m = case.derivatives, case.module
    transposed = (case.out.flatten(1) @ case.jacobian).reshape(V, *case.x.shape)
    assert_close(d.jac_t_mat_prod(m, None, None, case.out), transposed)
    assert_close(d.jac_t_mat_prod(m, None, None, case.out[0]), transposed[0])
    few = d.jac_t_mat_prod(m, None, None, case.out[:, [2, 0]], subsampling=[2, 0])
    assert_close(few, transposed[:, [2, 0]])
    forward = (case.inp.flatten(1) @ case.jacobian.T).reshape(V, *case.y.shape)
    assert_close(d.jac_mat_prod(m, None, None, case.inp), forward)
    assert_close(d.jac_mat_prod(m, None, None, case.inp[1]), forward[1])


def test_batch_average(case: Case) -> None:
    size = case.y[0].numel()
    mat = torch.randn(size, size)
    blocks = case.jacobian.reshape(N, size, N, -1)
    expected = sum(blocks[n, :, n].T @ mat @ blocks[n, :, n] for n in range(N)) / N
    assert_close(
        case.derivatives.ea_jac_t_mat_jac_prod(case.module, None, None, mat),
        torch.as_tensor(expected),
    )


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in RECURRENT])
def test_second_derivatives(name: str) -> None:
    case = Case(name)
    d, m, size = case.derivatives, case.module, case.x.numel()
    g = torch.randn_like(case.y)
    hessian = torch.autograd.functional.hessian(lambda x: (case.forward(x) * g).sum(), case.x)
    hessian = hessian.reshape(size, size)
    expected = (case.inp.flatten(1) @ hessian).reshape(V, *case.x.shape)
    assert_close(d.residual_mat_prod(m, None, (g,), case.inp), expected)
    if d.hessian_is_zero(m):
        assert not hessian.any()
    elif d.hessian_is_diagonal(m):
        assert_close(d.hessian_diagonal(m, None, (g,)), hessian.diagonal().reshape(case.x.shape))


def test_parameters(case: Case) -> None:
    d, m = case.derivatives, case.module
    for name, parameter in m.named_parameters():
        jacobian = _parameter_jacobian(case, name, parameter)  # [N, out, *θ]
        expected = torch.einsum("vno,nop->vnp", case.out.flatten(2), jacobian.flatten(2))
        expected = expected.reshape(V, N, *parameter.shape)
        args = (name, m, None, None)
        assert_close(d.param_mjp(*args, case.out, sum_batch=False), expected)
        assert_close(d.param_mjp(*args, case.out), expected.sum(1))
        few = d.param_mjp(*args, case.out[0][[1, 2]], sum_batch=False, subsampling=[1, 2])
        assert_close(few, expected[0, [1, 2]])
        if name in ("weight", "bias"):
            mat = torch.randn(V, *parameter.shape)
            product = torch.einsum("nop,vp->vno", jacobian.flatten(2), mat.flatten(1))
            found = getattr(d, f"{name}_jac_mat_prod")(m, None, None, mat)
            assert_close(found, product.reshape(V, *case.y.shape))


def _parameter_jacobian(case: Case, name: str, parameter: Tensor) -> Tensor:
    def forward(value: Tensor) -> Tensor:
        with disable():
            result = torch.func.functional_call(case.module, {name: value}, (case.x,))
        return result[0] if isinstance(result, tuple) else result

    jacobian = torch.autograd.functional.jacobian(forward, parameter.detach())
    return jacobian.reshape(N, -1, *parameter.shape)


def test_a_layer_of_one_s_own() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**2

    class SquareDerivatives(ElementwiseDerivatives):
        def df(self, module: Any, g_inp: Any, g_out: Any, subsampling: Any = None) -> Tensor:
            return 2 * (module.input0 if subsampling is None else module.input0[subsampling])

        def d2f(self, module: Any, g_inp: Any, g_out: Any) -> Tensor:
            return 2 * torch.ones_like(module.input0)

    d, module = SquareDerivatives(), extend(Square())
    x = torch.randn(N, 2)
    module(x.requires_grad_())
    mat = torch.randn(V, N, 2)
    assert_close(d.jac_t_mat_prod(module, None, None, mat), 2 * x * mat)
    assert_close(d.jac_mat_prod(module, None, None, mat), 2 * x * mat)
    assert_close(d.hessian_diagonal(module, None, (mat[0],)), 2 * mat[0])
    assert not d.hessian_is_zero(module)
    with pytest.raises(NotImplementedError, match="no layer rule for Square"):
        DERIVATIVES["FlattenDerivatives"]().jac_t_mat_prod(module, None, None, mat)
    with pytest.raises(NotImplementedError, match="not known as an activation"):
        DERIVATIVES["SigmoidDerivatives"]().jac_t_mat_prod(_linear(), None, None, mat)


def _linear() -> nn.Linear:
    module = extend(nn.Linear(3, 2))
    module(torch.randn(N, 3))
    return module


def test_parameters_of_one_s_own() -> None:
    class Mine(BaseParameterDerivatives):
        def _scale_jac_t_mat_prod(
            self, module: Any, g_inp: Any, g_out: Any, mat: Any, **_: Any
        ) -> Any:
            return mat.sum((1, 2))[:, None]

        def _bias_jac_mat_prod(self, module: Any, g_inp: Any, g_out: Any, mat: Any) -> Any:
            return mat

    module, mat = _linear(), torch.randn(V, N, 2)
    assert_close(Mine().param_mjp("scale", module, None, None, mat), mat.sum((1, 2))[:, None])
    with pytest.raises(NotImplementedError, match="'other'"):
        Mine().param_mjp("other", module, None, None, mat)
    bias = torch.randn(V, 2)
    assert_close(Mine().bias_jac_mat_prod(module, None, None, bias), bias)


def test_shapes_are_checked() -> None:
    module = _linear()
    d: Any = DERIVATIVES["LinearDerivatives"]()
    with pytest.raises(RuntimeError, match=r"like output has shape \[V, 3, 2\]"):
        d.jac_t_mat_prod(module, None, None, torch.zeros(1, 3, 3))
    assert d.reshape_like_input(torch.zeros(2, 9), module).shape == (2, 3, 3)
    assert d.reshape_like_input(torch.zeros(2, 3), module, subsampling=[0]).shape == (2, 1, 3)
    assert d.reshape_like_output(torch.zeros(6), module).shape == (1, 3, 2)
    assert d._get_additional_dims(module) == torch.Size([])


def test_without_a_forward_pass() -> None:
    with pytest.raises(StoredIOError, match="run a forward pass"):
        linear_utils.extract_bias_diagonal(nn.Linear(2, 2), torch.zeros(1, 1, 2))


def test_batch_norm_in_train_mode() -> None:
    module = extend(nn.BatchNorm1d(2))
    module(torch.randn(N, 2))
    with pytest.raises(SampleMixingError):
        DERIVATIVES["BatchNormNdDerivatives"]().jac_t_mat_prod(
            module, None, None, torch.zeros(1, N, 2)
        )


def test_adaptive_pooling_as_average_pooling() -> None:
    d: Any = DERIVATIVES["AdaptiveAvgPool2dDerivatives"]()
    x = torch.randn(N, 1, 4, 6)
    even, uneven = extend(nn.AdaptiveAvgPool2d((2, 3))), extend(nn.AdaptiveAvgPool2d((3, None)))
    expected = even(x)
    uneven(x)
    d.check_parameters(even)
    stride, kernel, padding = d.get_avg_pool_parameters(even)
    assert d.get_parameters(even) == (stride, kernel, padding) == ([2, 2], [2, 2], [0, 0])
    assert_close(nn.functional.avg_pool2d(x, kernel, stride, padding), expected)
    with pytest.raises(NotImplementedError, match=r"\[4, 6\] pixels to \[3, 6\]"):
        d.check_parameters(uneven)


def test_train_mode_has_second_derivatives() -> None:
    module, d = nn.BatchNorm1d(4), DERIVATIVES["BatchNormNdDerivatives"]()
    assert not d.hessian_is_zero(module)
    assert d.hessian_is_zero(module.eval())
    extend(module.train())(torch.randn(N, 4))
    assert not d.hessian_is_zero(module)
    assert not d.hessian_is_diagonal(module)


def test_diagonals() -> None:
    module, columns = _linear(), torch.randn(V, N, 2)
    product = torch.einsum("vno,ni->vnoi", columns, module.input0)  # type: ignore[arg-type]
    weight = linear_utils.extract_weight_diagonal(module, columns, sum_batch=False)
    assert_close(weight, product.square().sum(0))
    bias = linear_utils.extract_bias_diagonal(module, columns)
    assert_close(bias, columns.square().sum((0, 1)))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unfolded_inputs(dims: int) -> None:
    """With ones in place of the kernel, unfolding and summing is the convolution."""
    for kind, unfold in (
        (conv.get_conv_module(dims), conv.unfold_by_conv),
        (conv_transpose.get_conv_transpose_module(dims), conv_transpose.unfold_by_conv_transpose),
    ):
        module: Any = extend(kind(2, 3, 2, stride=2, padding=1, bias=False))  # type: ignore[call-arg]
        x = torch.randn(N, 2, *[4] * dims)
        output = module(x)
        unfolded = unfold(x, module)
        is_transposed = kind is not conv.get_conv_module(dims)
        matrix = module.weight.transpose(0, 1) if is_transposed else module.weight
        expected = torch.einsum("ok,nkx->nox", matrix.flatten(1), unfolded)
        assert_close(expected, output.flatten(2))
        columns = torch.randn(V, *output.shape)
        squares = conv.extract_weight_diagonal(module, unfolded, columns)
        assert squares.shape == module.weight.shape
        assert_close(conv.get_weight_gradient_factors(x, columns[0], module)[0], unfolded)


def test_unfold_as_torch_does() -> None:
    module = nn.Conv2d(2, 3, (2, 3), stride=2, dilation=(1, 2), padding=1)
    x = torch.randn(N, 2, 6, 7)
    expected = nn.functional.unfold(x, (2, 3), dilation=(1, 2), padding=1, stride=2)
    assert_close(conv.unfold_input(module, x), expected)
    d: Any = DERIVATIVES["Conv2DDerivatives"]()
    module = extend(module)
    module(x)
    assert_close(d.get_unfolded_input(module), expected)
    assert conv.get_conv_function(2) is nn.functional.conv2d
    assert conv_transpose.get_conv_transpose_function(1) is nn.functional.conv_transpose1d


def test_save_memory_is_accepted() -> None:
    with weight_jac_t_save_memory(True):
        assert weight_jac_t_save_memory._SAVE_MEMORY
    assert not weight_jac_t_save_memory._SAVE_MEMORY
