"""Second derivatives at operations where torch's own are wrong or rounded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import GGNMP, HMP, JMP, PCHMP, BatchGrad, DiagHMP
from backpack_secondorder.over_data import GGN, Hessian
from backpack_secondorder.twice import gradients
from tests.cases import Net
from tests.faults.own_functions import Sine
from tests.oracle import assert_close


class Plain(nn.Module):
    """The same from operations that torch differentiates twice as it should."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        """``g v / ‖v‖``."""
        axes = [axis for axis in range(v.dim()) if axis != self.kept]
        return g * v / v.square().sum(axes, keepdim=True).sqrt()

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Norms, and directions."""
        axes = [axis for axis in range(w.dim()) if axis != self.kept]
        return w.square().sum(axes, keepdim=True).sqrt(), w


def fused(layer: nn.Module, kept: int) -> nn.Module:
    found: nn.Module = parametrizations.weight_norm(layer, dim=kept)
    return found


def plain(layer: nn.Module, kept: int) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Plain(kept))
    return layer


def by_hooks(layer: nn.Module, kept: int) -> nn.Module:
    found: nn.Module = nn.utils.weight_norm(layer, dim=kept)
    return found


Made = Callable[[nn.Module, int], nn.Module]
NETS: dict[str, Callable[[Made], nn.Sequential]] = {
    "first axis": lambda made: nn.Sequential(made(nn.Linear(3, 3), 0), nn.Tanh(), nn.Linear(3, 2)),
    "last axis": lambda made: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), made(nn.Linear(3, 2), 1)),
    "several": lambda made: nn.Sequential(
        made(nn.Linear(3, 3), 0), nn.Sigmoid(), made(nn.Linear(3, 2), 1), made(nn.Linear(2, 2), 0)
    ),
    "convolution": lambda made: nn.Sequential(
        nn.Unflatten(1, (1, 3)), made(nn.Conv1d(1, 2, 2), 0), nn.Tanh(), nn.Flatten(),
        made(nn.Linear(4, 2), 0),
    ),
    "last of three": lambda made: nn.Sequential(
        nn.Unflatten(1, (1, 3)), made(nn.Conv1d(1, 2, 2), 2), nn.Tanh(), nn.Flatten(),
        nn.Linear(4, 2),
    ),
}  # fmt: skip


def pair(net: str, made: Made) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A net, and the same by plain operations with the same numbers, and data."""
    torch.manual_seed(3)
    model = NETS[net](made)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)  # the norm of v is not g
    torch.manual_seed(3)
    other = NETS[net](plain)
    names = [name for name, _ in other.named_parameters()]
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            same = name
            if made is by_hooks:
                same = name.replace("parametrizations.weight.original0", "weight_g")
                same = same.replace("parametrizations.weight.original1", "weight_v")
            dict(other.named_parameters())[name].copy_(theirs[same])
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    assert_close(model(x).detach(), other(x).detach())
    return model, other, x, y


def ordered(model: nn.Module) -> list[Tensor]:
    """Parameters by name, in one order for all three kinds."""
    found = {}
    for name, p in model.named_parameters():
        name = name.replace("weight_g", "parametrizations.weight.original0")
        found[name.replace("weight_v", "parametrizations.weight.original1")] = p
    return [found[name] for name in sorted(found)]


def hessian(model: nn.Module, x: Tensor, y: Tensor, some: list[int] | None = None) -> Tensor:
    """The whole Hessian of the mean by plain autograd, ``[P, P]``."""
    parameters = ordered(model)
    error = (model(x) - y).square() / y.numel()
    loss = error.sum() if some is None else error[some].sum()
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([g.flatten() for g in first])
    rows = [
        torch.autograd.grad(
            e, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for e in flat
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def blocks(model: nn.Module, matrix: Tensor) -> list[Tensor]:
    sizes = [p.numel() for p in ordered(model)]
    return [row.split(sizes, 1)[k] for k, row in enumerate(matrix.split(sizes, 0))]


@pytest.mark.host("a GPU has norms of weights in single precision")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("made", [fused, by_hooks, plain])
@pytest.mark.parametrize("net", NETS)
def test_products(net: str, made: Made) -> None:
    model, other, x, y = pair(net, made)
    wanted = blocks(other, hessian(other, x, y))
    some = blocks(other, hessian(other, x, y, [3, 0]))
    extend(model)
    lossfunc = extend(nn.MSELoss())
    with backpack(HMP(), DiagHMP(), HMP("some", subsampling=[3, 0]), GGNMP()):
        lossfunc(model(x), y).backward()
    for p, block, part in zip(ordered(model), wanted, some, strict=True):
        units: Any = torch.eye(p.numel()).reshape(p.numel(), *p.shape)
        assert_close(p.hmp(units).reshape(block.shape), block)
        assert_close(p.some(units).reshape(block.shape), part)
        assert_close(p.diag_hmp.flatten(), block.diagonal())


@pytest.mark.host("a GPU has norms of weights in single precision")
@pytest.mark.parametrize("net", NETS)
def test_over_data(net: str) -> None:
    model, other, x, y = pair(net, fused)
    loader = [(x[:2], y[:2]), (x[2:], y[2:])]
    for kind in (Hessian, GGN):
        found, wanted = (kind(m, nn.MSELoss(), loader) for m in (model, other))
        eye = torch.eye(found.shape[0])
        assert_close(found @ eye, wanted @ eye)


@pytest.mark.host("a GPU has norms of weights in single precision")
def test_inside_of_a_checkpoint() -> None:
    model, other, x, y = pair("several", fused)
    forward = lambda model, batch: (checkpoint(model, batch[0], use_reentrant=False), batch[1])  # noqa: E731
    found = Hessian(model, nn.MSELoss(), [(x, y)], forward=forward)
    assert_close(found.dense(), Hessian(other, nn.MSELoss(), [(x, y)]).dense())


@pytest.mark.parametrize("operator", [GGN, Hessian])
def test_hard_sigmoid(operator: Any) -> None:
    """Torch has no derivative of its gradient."""
    torch.manual_seed(0)
    parts = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 2)}
    model = Net(lambda net, x: net.last(F.hardsigmoid(net.first(x))), **parts)
    other = Net(lambda net, x: net.last(F.relu6(net.first(x) + 3) / 6), **parts)
    data = [(4 * torch.randn(5, 3), torch.randn(5, 2))]
    found, wanted = (operator(net, nn.MSELoss(), data).dense() for net in (model, other))
    torch.testing.assert_close(found, wanted)
    assert wanted.any()


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "of one axis": (nn.Conv1d(3, 4, 2), (3, 5)),
    "of two axes": (nn.Conv2d(2, 3, 2, padding=1), (2, 3, 4)),
    "of three axes, without a bias": (nn.Conv3d(2, 2, 2, bias=False), (2, 3, 2, 3)),
    "strides, groups": (nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2, groups=2), (4, 6, 5)),
    "by channel": (nn.Conv2d(3, 6, 2, groups=3), (3, 3, 3)),
    "transposed": (nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, groups=2), (4, 3, 2)),
    "padded": (nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), (2, 3)),
}


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        (kind, taken)
        for kind, (layer, _) in CONVOLUTIONS.items()
        for taken in ("everything", "image", *dict(layer.named_parameters()))
    ],
)
def test_derivatives_of_convolutions(kind: str, taken: str) -> None:
    """Up to the third one, along random directions, beside torch's own."""
    torch.manual_seed(0)
    layer, shape = CONVOLUTIONS[kind]
    image = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    given = {"image": image, **dict(copy.deepcopy(layer).double().named_parameters())}
    weights = {name: tensor.sin() for name, tensor in given.items() if name != "image"}
    output = torch.func.functional_call(layer, weights, (image.sin(),))
    inputs = [*given.values()] if taken == "everything" else [given[taken]]
    ours = right = [(output.sin() * output).sum()]
    for _ in range(2 if kind == "padded" else 3):  # torch's own third derivative fails there
        directions = [torch.randn_like(tensor) for tensor in ours]
        ours = gradients(ours, inputs, directions, create_graph=True)
        right = [*torch.autograd.grad(right, inputs, directions, create_graph=True)]
        for found, expected in zip(ours, right, strict=True):
            assert_close(found, expected)


@pytest.mark.host("a GPU has norms of weights in single precision")
def test_against_differences() -> None:
    """No formula of torch's own takes part."""
    model, _, x, y = pair("several", fused)
    before = copy.deepcopy(model)
    extend(model)
    lossfunc = extend(nn.MSELoss())
    with backpack(HMP()):
        lossfunc(model(x), y).backward()

    def gradient(p: Tensor, shift: Tensor) -> Tensor:
        with torch.no_grad():
            p.add_(shift)
        found = torch.autograd.grad(nn.functional.mse_loss(before(x), y), p)[0]
        with torch.no_grad():
            p.sub_(shift)
        return found

    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        v = torch.randn(p.shape)
        wanted = (gradient(q, 1e-5 * v) - gradient(q, -1e-5 * v)) / 2e-5
        assert_close(p.hmp(v), wanted, rtol=1e-6)


@pytest.mark.host("a GPU has norms of weights in single precision")
def test_nothing_is_left_at_the_nodes() -> None:
    """A pass of the user's is torch's, before and after."""
    model, _, x, y = pair("first axis", fused)
    extend(model)
    loss = extend(nn.MSELoss())(model(x), y)
    with backpack(HMP()):
        loss.backward(retain_graph=True)
    p: Any = next(p for p in model.parameters() if p.dim() > 1)
    p.hmp(torch.ones_like(p))
    node = next(n for n in _nodes(loss.grad_fn) if n.name() == "WeightNormInterfaceBackward0")
    arrived: list[Any] = []
    handle = node.register_hook(lambda sent, got: arrived.append(sent))
    loss.backward()
    handle.remove()
    assert len(arrived) == 1


def _nodes(start: Any) -> list[Any]:
    found, todo = [], [start]
    while todo:
        found.append(node := todo.pop())
        todo += [child for child, _ in node.next_functions if child is not None]
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_binary_cross_entropy_of_small_probabilities(reduction: str, is_weighted: bool) -> None:
    """Torch's second derivative adds 1e-12 to them."""
    layer = extend(nn.Linear(2, 3).double())
    with torch.no_grad():
        layer.bias.sub_(14)
    weight = torch.rand(4, 3).double() if is_weighted else torch.ones(4, 3).double()
    given = weight if is_weighted else None
    lossfunc = extend(nn.BCELoss(given, reduction=reduction))
    x, y = torch.randn(4, 2).double(), torch.rand(4, 3).double()
    p = layer(x).sigmoid()
    terms = -weight * (y * p.log() + (1 - y) * torch.log1p(-p))
    total = terms.sum() if reduction == "sum" else terms.mean()
    parameters = list(layer.parameters())
    gradients = torch.autograd.grad(total, parameters, create_graph=True)
    with backpack(HMP()):
        lossfunc(layer(x).sigmoid(), y).backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        vector = torch.randn_like(parameter)
        (expected,) = torch.autograd.grad(gradient, parameter, vector, retain_graph=True)
        product = parameter.hmp(vector.unsqueeze(0)).squeeze(0)  # type: ignore[attr-defined]
        size = float(expected.abs().max())
        torch.testing.assert_close(product, expected, rtol=0, atol=1e-9 * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gap", [0.0, 6.0, 12.0, 30.0])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 2), (2, 2, 3)], ids=str)
def test_certain_classes(shape: tuple[int, ...], gap: float, dtype: torch.dtype) -> None:
    """``p - p²`` cancels where a probability is nearly one."""
    axis = shape.index(3)
    logits = torch.zeros(shape).movedim(axis, -1)
    logits[..., 1], logits[..., 2] = gap, 0.5
    logits = logits.movedim(-1, axis).to(dtype)

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (
                (x.movedim(axis, -1) + self.bias).movedim(-1, axis).log_softmax(axis - len(shape))
            )

    model = extend(Bias())
    with backpack(HMP(), DiagHMP()):
        (-model(logits).select(axis, 0).sum()).backward()
    p = logits.double().softmax(axis).movedim(axis, -1).reshape(-1, 3)
    expected = -torch.einsum("ni,nj->ij", p, p)
    expected.fill_diagonal_(0.0)
    expected -= torch.diag(expected.sum(1))
    rounding = 16 * torch.finfo(dtype).eps
    assert_close(model.bias.hmp(torch.eye(3, dtype=dtype)).double(), expected, rounding)
    assert_close(model.bias.diag_hmp.double(), expected.diagonal(), rounding)


@pytest.mark.parametrize("operator", [GGN, Hessian])
def test_certain_classes_over_data(operator: Any) -> None:
    model = nn.Linear(1, 2, dtype=torch.float32)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[20.0], [0.0]]))
        model.bias.zero_()
    data = [(torch.ones(1, 1), torch.tensor([0]))]
    matrix = operator(model, nn.CrossEntropyLoss(), [(x.float(), y) for x, y in data])
    found = matrix @ torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float32)
    small = torch.tensor(-20.0, dtype=torch.float64).sigmoid()
    assert_close(found.double(), small * torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("logit", [-20.0, -6.0, 0.0, 6.0, 20.0])
@pytest.mark.parametrize(
    "loss", [nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss]
)
def test_certain_labels(loss: type[nn.Module], logit: float, dtype: torch.dtype) -> None:
    """``σ (1 - σ)`` cancels where ``σ`` is nearly one."""
    model = extend(nn.Linear(1, 1, bias=False, dtype=dtype))
    nn.init.constant_(model.weight, logit)
    one = torch.ones(1, 1, dtype=dtype)
    with backpack(HMP()):
        loss(reduction="sum")(model(one), one).backward()
    x = torch.tensor([[logit]], dtype=torch.float64)
    rounding = 8 * torch.finfo(dtype).eps
    assert_close(model.weight.hmp(one).double(), x.sigmoid() * (-x).sigmoid(), rounding)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_labels_that_are_learned(weighted: bool, reduction: str) -> None:
    """The formula has the derivatives in the target, too."""
    options: dict[str, Any] = {"reduction": reduction}
    if weighted:
        options |= {"weight": torch.rand(2), "pos_weight": torch.rand(2)}
    lossfunc = nn.BCEWithLogitsLoss(**options)
    x = torch.randn(3, 2)

    def value(model: nn.Module) -> Tensor:
        found: Tensor = lossfunc(model(x), model(x).tanh())
        return found

    model = nn.Linear(2, 2)
    block = torch.autograd.functional.hessian(
        lambda w: lossfunc(x @ w.T + model.bias, (x @ w.T + model.bias).tanh()), model.weight
    )
    extend(model)
    with backpack(HMP()):
        value(model).backward()
    vectors = torch.eye(4).reshape(4, 2, 2)
    assert_close(model.weight.hmp(vectors).reshape(4, 4), block.reshape(4, 4).detach())


class Once(Sine):
    """Marked as not to be differentiated."""

    backward = staticmethod(once_differentiable(Sine.backward))


class Nested(Sine):
    """By autograd, without a graph."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, grad)


class Sign(Sine):
    """The derivative is zero, and has no graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.zeros_like(grad)


def function_net(function: Any) -> nn.Module:
    """A function between modules."""
    torch.manual_seed(0)
    parts = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 2)}
    net = Net(lambda net, x: net.last(function(net.first(x)) + net.first(x)), **parts)
    return net.double()


def products(net: nn.Module, kind: Any) -> list[Tensor]:
    """Of every parameter with ones, after one pass."""
    extend(net)
    lossfunc = extend(nn.MSELoss())
    x, y = torch.linspace(-1, 1, 15).double().reshape(5, 3), torch.ones(5, 2).double()
    with backpack(kind()):
        lossfunc(net(x), y).backward()
    found = [getattr(p, kind.savefield) for p in net.parameters()]
    ones = [torch.ones_like(p) for p in net.parameters()]
    return [f(v) if callable(f) else f for f, v in zip(found, ones, strict=True)]


PRODUCTS = [GGNMP, HMP, DiagHMP, JMP]


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(("function", "same"), [(Sine, torch.sin), (Sign, torch.sign)])
def test_functions_of_users(function: Any, same: Any, kind: Any) -> None:
    found = products(function_net(function.apply), kind)
    for ours, theirs in zip(found, products(function_net(same), kind), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [*PRODUCTS, PCHMP])
@pytest.mark.parametrize("function", [Once, Nested])
def test_functions_without_a_graph(function: Any, kind: Any) -> None:
    with pytest.raises(UnsupportedError):
        products(function_net(function.apply), kind)


def test_a_marked_function_under_a_linear_loss() -> None:
    """What arrives there has no graph, so that only the mark tells."""
    model = extend(nn.Linear(3, 2))
    with backpack(HMP()):
        Once.apply(model(torch.randn(4, 3))).sum().backward()
    with pytest.raises(UnsupportedError, match="returns gradients without a graph"):
        model.weight.hmp(torch.ones_like(model.weight))


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="this version has no chunks"
)
def test_linear_cross_entropy_in_chunks() -> None:
    torch.manual_seed(0)
    model, head, x, y = (
        extend(nn.Linear(3, 4)),
        torch.randn(5, 4),
        torch.randn(4, 3),
        torch.arange(4),
    )
    settings: dict[str, Any] = {"batch_chunk_size": 2, "chunking_method": None}
    options = nn.LinearCrossEntropyOptions(**settings)
    with backpack(BatchGrad()):
        F.linear_cross_entropy(model(x), head, y, options=options).backward()
    found = model.weight.grad_batch
    with backpack(BatchGrad()):
        F.cross_entropy(model(x) @ head.T, y).backward()
    assert_close(found, model.weight.grad_batch)
    options = nn.LinearCrossEntropyOptions(**settings, allow_retain_graph=True)
    with backpack(HMP()):
        F.linear_cross_entropy(model(x), head, y, options=options).backward()
    with pytest.raises(UnsupportedError, match="returns gradients without a graph"):
        model.weight.hmp(torch.ones_like(model.weight))
