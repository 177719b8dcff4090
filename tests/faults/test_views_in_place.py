"""Operations that change a module's output in place, where that output is a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, disable
from backpack_layers.modules import Slicing
from tests.cases import Net, Problem, classification
from tests.faults.problems import KINDS, check, expect

pytestmark = [
    pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning"),
    pytest.mark.filterwarnings("ignore::backpack_core.errors.UncoveredParameterWarning"),
]

TOKENS = (3, 4)


def _attention() -> Net:
    part = nn.MultiheadAttention(4, 2, batch_first=True)
    return Net(lambda net, x: net.part(x, x, x, need_weights=False)[0], part=part)


def _first(part: nn.Module) -> Net:
    """The first of what a module returns."""
    return Net(lambda net, x: net.part(x)[0], part=part)


def _own_view() -> Net:
    """A module without a rule."""
    return Net(lambda net, x: (x * net.scale).mT, scale=nn.Parameter(torch.randn(4)))


def _slots(part: nn.Module) -> Net:
    """A part that gets all slots as rows, inside of a module that returns a view of its output."""

    def forward(net: Any, x: Tensor) -> Tensor:
        read = net.queries.softmax(1) @ x
        return net.part(read.flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]

    return Net(forward, part=part, queries=nn.Parameter(torch.randn(3, 3)))


Layer = tuple[Callable[[], nn.Module], tuple[int, ...]]
LAYERS: dict[str, Layer] = {
    "tokens": (lambda: nn.Linear(4, 4), TOKENS),
    "attention": (_attention, TOKENS),
    "lstm": (lambda: _first(nn.LSTM(4, 4, batch_first=True)), TOKENS),
    "instance_norm": (lambda: nn.InstanceNorm1d(3, affine=True), TOKENS),
    "instance_norm_2d": (lambda: nn.InstanceNorm2d(2, affine=True), (2, 3, 2)),
    "own": (_own_view, TOKENS),
    "slots": (lambda: _slots(nn.Linear(4, 4)), TOKENS),
    "slots_cell": (lambda: _slots(nn.GRUCell(4, 4)), TOKENS),
    "slots_inside": (lambda: nn.Sequential(_slots(nn.Linear(4, 4))), TOKENS),
    "tokens_identity": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Identity()), TOKENS),
    "tokens_dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout().eval()), TOKENS),
    "tokens_flatten": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten()), TOKENS),
    "tokens_slice": (
        lambda: nn.Sequential(nn.Linear(4, 4), Slicing((slice(None), slice(1, None)))),
        TOKENS,
    ),
    "unflatten": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))), (4,)),
    "pooling": (lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.AvgPool1d(2)), TOKENS),
    # no views
    "tokens_without_bias": (lambda: nn.Linear(4, 4, bias=False), TOKENS),
    "linear": (lambda: nn.Linear(4, 4), (4,)),
    "convolution": (lambda: nn.Conv1d(3, 3, 1), TOKENS),
}


class Triple(torch.autograd.Function):
    """Changes its argument and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3.0 * grad


def _assign(h: Tensor, x: Tensor) -> Tensor:
    h[:, 0] = 0.5
    return h


def _assign_computed(h: Tensor, x: Tensor) -> Tensor:
    h[:, -1] = 2 * h[:, 0].exp()
    return h


def _part(h: Tensor, x: Tensor) -> Tensor:
    h[:, :1].mul_(3.0)
    return h


def _step_by_step(h: Tensor, x: Tensor) -> Tensor:
    for t in range(1, h.shape[1]):
        h[:, t] += h[:, t - 1] * 0.5
    return h


def _residual(h: Tensor, x: Tensor) -> Tensor:
    h += x.flatten(1)[:, :1].reshape(-1, *[1] * (h.dim() - 1)).expand_as(h)
    return h


def _masked(h: Tensor, x: Tensor) -> Tensor:
    return h.masked_fill_(h.detach() > 0.1, 0.0)


def _through_another_view(h: Tensor, x: Tensor) -> Tensor:
    h.view(len(h), -1).mul_(2.0)
    h.select(1, 0).tanh_()
    return h


def _without_grad(h: Tensor, x: Tensor) -> Tensor:
    """Autograd does not see this one."""
    with torch.no_grad():
        h.mul_(2.0)
    return h


def _twice(h: Tensor, x: Tensor) -> Tensor:
    h.mul_(0.5)
    return torch.sin(h).mul_(2.0).add_(h)


def _read_before_and_after(h: Tensor, x: Tensor) -> Tensor:
    before = h * 3.0
    h.tanh_()
    return before + h


Operation = Callable[[Tensor, Tensor], Tensor]
OPERATIONS: dict[str, Operation] = {
    "module": lambda h, x: nn.ReLU(inplace=True)(h),
    "function": lambda h, x: F.silu(h, inplace=True),
    "method": lambda h, x: h.relu_(),
    "scale": lambda h, x: h.mul_(2.0),
    "nonlinear": lambda h, x: h.tanh_(),
    "residual": _residual,
    "assign": _assign,
    "assign_computed": _assign_computed,
    "part": _part,
    "step_by_step": _step_by_step,
    "masked": _masked,
    "clamp": lambda h, x: h.clamp_(-0.2, 0.3),
    "copy": lambda h, x: h.copy_(2 * h + x),
    "transpose": lambda h, x: h.transpose_(1, -1),
    "unsqueeze": lambda h, x: h.unsqueeze_(1).exp(),
    "another_view": _through_another_view,
    "custom_function": lambda h, x: Triple.apply(h),  # type: ignore[no-any-return, no-untyped-call]
    "without_grad": _without_grad,
    "twice": _twice,
    "read_before_and_after": _read_before_and_after,
}


def net_of(layer: nn.Module, shape: tuple[int, ...], operation: Operation) -> Net:
    """A linear layer, the layer, the operation, and a linear layer."""

    def forward(net: Any, x: Tensor) -> Tensor:
        before = net.first(x)
        return net.last(operation(net.layer(before), before).flatten(1))  # type: ignore[no-any-return]

    first = nn.Linear(shape[-1], shape[-1], bias=False)
    features = layer(torch.randn(2, *shape)).flatten(1).shape[1]
    return Net(forward, first=first, layer=layer, last=nn.Linear(features, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_on_tokens(operation: str, kind: str) -> None:
    net = net_of(nn.Linear(4, 4), TOKENS, OPERATIONS[operation])
    check(classification(net, TOKENS), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["module", "scale", "part", "twice"])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("layer", ["slots", "slots_cell", "slots_inside"])
def test_output_of_the_net(layer: str, batch: int, operation: str, kind: str) -> None:
    """Nothing behind the view tells how many rows of its base each sample has."""
    part = LAYERS[layer][0]()
    net = Net(lambda net, x: OPERATIONS[operation](net.part(x), x), part=part)
    x, y = torch.randn(batch, *TOKENS, requires_grad=True), torch.randn(batch, *TOKENS)
    check(Problem(net, (x,), nn.MSELoss(reduction="sum"), y), kind)


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("operation", ["module", "residual", "part"])
@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "tokens"])
def test_layers(layer: str, operation: str, kind: str) -> None:
    make, shape = LAYERS[layer]
    check(classification(net_of(make(), shape, OPERATIONS[operation]), shape), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "reduction"), [(1, "mean"), (4, "sum")])
def test_settings(batch: int, reduction: str, kind: str) -> None:
    layers = [nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2), nn.SiLU(inplace=True)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 3))
    check(classification(model, TOKENS, batch, reduction=reduction), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout(kind: str) -> None:
    layers = [nn.Linear(4, 4), nn.Dropout(0.4, inplace=True), nn.Flatten(), nn.Linear(12, 3)]
    problem = classification(nn.Sequential(*layers), TOKENS)
    problem.whole = True
    check(problem, kind)


def _two_consumers(net: Any, x: Tensor) -> Tensor:
    hidden = net.a(x)
    mean = hidden.mean(1)
    hidden.relu_()
    return net.c(torch.cat([net.b(hidden).mean(1), mean], 1))  # type: ignore[no-any-return]


def _view_of_the_input(net: Any, x: Tensor) -> Tensor:
    """A module returned a view of its input, which changes under it."""
    hidden = net.a(x)
    flat = net.flatten(hidden)
    hidden.mul_(2.0)
    return net.c(flat[:, :8])  # type: ignore[no-any-return]


def _residual_stream(net: Any, x: Tensor) -> Tensor:
    stream = net.a(x)
    stream += net.b(stream.clone())
    stream += net.b(torch.tanh(stream))
    return net.c(stream.flatten(1)[:, :8])  # type: ignore[no-any-return]


def _branch_changed(net: Any, x: Tensor) -> Tensor:
    hidden = net.a(x)
    branch = net.b(torch.tanh(hidden))
    branch += hidden
    branch[:, 0] *= 2
    return net.c(branch.flatten(1)[:, :8])  # type: ignore[no-any-return]


def _inside_a_block(net: Any, x: Tensor) -> Tensor:
    return net.c(net.flatten(net.block(x)).mul_(2.0)[:, :8])  # type: ignore[no-any-return]


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ELU(1.0, inplace=True), nn.Linear(4, 4))


def _linear(*names: str) -> dict[str, Any]:
    return {name: nn.Linear(4, 4) for name in names}


NETS: dict[str, Callable[[], Net]] = {
    "two_consumers": lambda: Net(_two_consumers, **_linear("a", "b")),
    "view_of_the_input": lambda: Net(_view_of_the_input, **_linear("a"), flatten=nn.Flatten()),
    "residual_stream": lambda: Net(_residual_stream, **_linear("a", "b")),
    "branch_changed": lambda: Net(_branch_changed, **_linear("a", "b")),
    "inside_a_block": lambda: Net(_inside_a_block, block=_block(), flatten=nn.Flatten()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETS)
def test_nets(name: str, kind: str) -> None:
    net = NETS[name]()
    net.c = nn.Linear(8, 3)
    check(classification(net, TOKENS), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint(kind: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: net.relu(net.a(x)), x, use_reentrant=False)
        return net.c(net.relu(net.b(hidden)).flatten(1))  # type: ignore[no-any-return]

    parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(12, 3)}
    net = Net(forward, **parts, relu=nn.ReLU(inplace=True))
    check(classification(net, TOKENS), kind)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_final_state(kind: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        _, (hidden, _) = net.a(x)
        return net.c(hidden[-1].tanh_())  # type: ignore[no-any-return]

    net = Net(forward, a=nn.LSTM(4, 4, batch_first=True), c=nn.Linear(4, 3))
    check(classification(net, TOKENS), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_own_module_without_a_view(kind: str) -> None:
    """Nothing is saved of its output, so that autograd does not mind either."""
    own = Net(lambda net, x: x * net.scale, scale=nn.Parameter(torch.randn(4)))
    layers = [nn.Linear(3, 4), own, nn.ReLU(inplace=True), nn.Linear(4, 3)]
    check(classification(nn.Sequential(*layers), (3,)), kind)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_no_values_of_an_earlier_pass(kind: str) -> None:
    """The same net once with the operation out of place, on other data, and once in place."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Flatten(), nn.Linear(12, 3))
    check(classification(model, TOKENS), kind)
    relu.inplace = True
    check(classification(model, TOKENS), kind)


def test_after_a_pass_that_recorded_nothing() -> None:
    """A first forward pass under ``disable`` and a plain backward pass leave nothing behind."""
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3)]
    problem: Problem = classification(nn.Sequential(*layers), TOKENS)
    expectation = expect(problem.expected, "gradients")
    with disable():
        problem.loss().backward()
    problem.loss().backward()
    problem.model.zero_grad()
    loss = problem.loss()
    with backpack(*expectation.extensions):
        loss.backward()
    expectation.compare(problem.parameters)
