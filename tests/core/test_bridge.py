"""Functional operations between modules: followed exactly, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import BridgeError, SampleMixingError, UnsupportedError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.graph.bridge import push
from tests import oracle
from tests.cases import Net, Problem, classification


class Cube(torch.autograd.Function):
    """Vectorised backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class NumpyCube(Cube):
    """A backward that vmap cannot see into."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.detach().numpy() ** 2 * grad.numpy())


class VmapCube(torch.autograd.Function):
    """A new-style function that declares support for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Halves(torch.autograd.Function):
    """Two outputs, of which one may get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return 2 * first + 3 * second


def scale_in_place(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :2] *= 3.0
    return x


def attention(x: Tensor) -> Tensor:
    tokens = x.reshape(len(x), 2, 2)
    q, k, v = tokens, tokens.roll(1, 2), tokens.flip(1)
    return F.scaled_dot_product_attention(q, k, v).reshape(len(x), 4)


def heads(x: Tensor) -> Tensor:
    """Batch and heads merged, as many attentions do."""
    merged = x.reshape(len(x) * 2, 2, 1)
    return torch.bmm((merged @ merged.mT).softmax(-1), merged).reshape(len(x), 4)


def through_splits(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    c, d = x.split([1, 3], 1)
    e, *_, f = x.unbind(1)
    stacked = torch.stack([e, f], 1)
    return torch.cat([a * b, stacked + d[:, :2], c * d[:, 2:]], 1)[:, :4]


# [N, 4] -> [N, 4]
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": torch.relu,
    "softmax": lambda x: x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm_eval": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "instance_norm": lambda x: F.instance_norm(x.reshape(-1, 1, 4)).reshape(-1, 4),
    "normalize": lambda x: F.normalize(x, dim=1),
    "residual": lambda x: x + torch.sin(x),
    "diamond": lambda x: torch.sin(x) * torch.cos(x) + x,
    "scalar": lambda x: 2.5 * x - 1,
    "broadcast_scale": lambda x: x * x[:, :1],
    "broadcast_mean": lambda x: x - x.mean(1, keepdim=True),
    "broadcast_constant": lambda x: x + torch.arange(4.0),
    "expand": lambda x: x[:, :1].expand(-1, 4) * x,
    "outer": lambda x: (x[:, :, None] * x[:, None, :]).sum(2),
    "einsum": lambda x: torch.einsum("ni,nj->nij", x, x).flatten(1)[:, 3:7],
    "attention": attention,
    "heads": heads,
    "time_first": lambda x: (
        x.reshape(-1, 2, 2).transpose(0, 1).cumsum(0).transpose(0, 1).flatten(1)
    ),
    "splits": through_splits,
    "only_one_part": lambda x: x.chunk(2, 1)[1].repeat(1, 2),
    "max_with_indices": lambda x: x * x.max(1, keepdim=True).values,
    "sort": lambda x: x.sort(1).values,
    "index": lambda x: x[:, [3, 0, 0, 2]],
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "in_place_slice": scale_in_place,
    "in_place_view": lambda x: (x * 1).view(-1).mul_(3.0).view(-1, 4),
    "clone_detach_sum": lambda x: x.clone() + x.detach(),
    "pad": lambda x: F.pad(x, (1, 1))[:, :4],
    "convolution": lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 3), padding=1).flatten(1),
    "max_pool": lambda x: F.max_pool1d(x[:, None], 2, 1, 1)[..., :4].flatten(1),
    "float_and_back": lambda x: x.float().double(),
    "custom_function": Cube.apply,
    "custom_function_numpy": NumpyCube.apply,
    "custom_function_vmap": VmapCube.apply,
    "custom_function_one_output": lambda x: Halves.apply(x)[1],
    "custom_function_two_outputs": lambda x: Halves.apply(x)[1] * Halves.apply(x)[0],
    "complex": lambda x: torch.fft.fft(x).abs(),
    "distances": lambda x: torch.cdist(x[:, :, None], 2 * x[:, :, None] + 1).flatten(1)[:, 3:7],
    "roll_a_number": lambda x: torch.stack([n.roll(1) for n in x.sin().flatten()]).view_as(x),
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_between_modules(name: str, batch: int) -> None:
    operation = OPERATIONS[name]
    model = Net(
        lambda net, x: net.last(operation(net.first(x))),
        first=nn.Linear(3, 4),
        last=nn.Linear(4, 3),
    )
    problem = classification(model, (3,), batch)
    problem.rtol = 1e-6 if name == "float_and_back" else 1e-10
    problem.check()


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_before_the_loss(name: str) -> None:
    operation = OPERATIONS[name]
    model = Net(lambda net, x: operation(net.first(x)), first=nn.Linear(3, 4))
    problem = classification(model, (3,), classes=4)
    problem.rtol = 1e-6 if name == "float_and_back" else 1e-10
    problem.check()


@pytest.mark.parametrize("columns", [1, 3])
def test_formula_that_vmap_gets_wrong(columns: int) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    node: Any = x.as_strided_scatter(torch.zeros(2, 2), (2, 2), (3, 1), 2).grad_fn
    mats = torch.randn(columns, 4, 3)
    assert torch.equal(push(node, {0: mats})[0], torch.stack([node(m.clone())[0] for m in mats]))


def test_transposed_square_map_between_convolutions() -> None:
    model = Net(
        lambda net, x: net.last(net.second(net.first(x).transpose(2, 3)).flatten(1)),
        first=nn.Conv2d(1, 2, 3, padding=1),
        second=nn.Conv2d(2, 1, 3, padding=1),
        last=nn.Linear(16, 3),
    )
    classification(model, (1, 4, 4)).check()


def test_residual_block_with_functional_activations() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = F.silu(net.stem(x))
        h = h + net.b(torch.relu(net.a(h)))
        h = F.layer_norm(h + torch.tanh(net.a2(h)), (4,))
        return net.head(h)

    parts = {"a": (4, 5), "b": (5, 4), "a2": (4, 4), "stem": (3, 4), "head": (4, 3)}
    model = Net(forward, **{name: nn.Linear(*sizes) for name, sizes in parts.items()})
    classification(model, (3,)).check()


def test_deep_residual_net_crosses_each_node_once() -> None:
    """Pushing eagerly over every path would take 2**40 steps."""
    model = nn.Sequential(
        nn.Linear(3, 3), Net(lambda net, x: [x := x + torch.sin(x) for _ in range(40)][-1])
    )
    classification(model, (3,)).check()


def test_several_columns_meet_from_two_heads() -> None:
    model = Net(
        lambda net, x: net.a(h := torch.tanh(net.stem(x))) * net.b(h),
        stem=nn.Linear(3, 4),
        a=nn.Linear(4, 3),
        b=nn.Linear(4, 3),
    )
    classification(model, (3,)).check()


@pytest.mark.parametrize("between", ["identity", "dropout", "flatten", "two"])
def test_modules_that_return_their_input(between: str) -> None:
    """They share a node with the module, or with the functional operation, before them."""
    modules = {
        "identity": [nn.Identity()],
        "dropout": [nn.Dropout()],
        "flatten": [nn.Flatten()],
        "two": [nn.Identity(), nn.Flatten(), nn.Dropout()],
    }[between]
    chain = nn.Sequential(nn.Linear(3, 4), *modules, nn.Tanh(), nn.Linear(4, 3), *modules)
    problem = classification(chain, (3,))
    chain.eval()
    problem.check()
    after_function = Net(
        lambda net, x: net.b(net.skip(torch.sin(net.a(x)))),
        a=nn.Linear(3, 4),
        skip=nn.Sequential(*modules),
        b=nn.Linear(4, 3),
    )
    problem = classification(after_function, (3,))
    after_function.eval()
    problem.check()


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_batch_norm_in_train_mode(functional: bool, extension: Any) -> None:
    def norm(net: Any, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True) if functional else net.norm(x)

    model = Net(
        lambda net, x: net.b(norm(net, net.a(x))),
        a=nn.Linear(3, 4),
        norm=nn.BatchNorm1d(4),
        b=nn.Linear(4, 3),
    )
    with pytest.raises(SampleMixingError, match=r"batch normalisation.*model\.eval\(\)"):
        classification(model, (3,)).run(extension())


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), block, nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        result: Tensor = self.last(h)
        return result


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(inplace=True))


def test_checkpoint() -> None:
    classification(Checkpointed(block(), reentrant=False), (3,)).check()


def test_max_pooling_inside_checkpoint() -> None:
    """Its rule reads what autograd saved, where that can be read twice."""
    pool = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(2, 4)
    )
    classification(Checkpointed(pool, reentrant=False), (3,)).check()


def test_function_inside_checkpoint() -> None:
    """Such a checkpoint gives each saved tensor once, and autograd itself wants it."""
    model = Checkpointed(Net(lambda _, x: torch.sin(x)), reentrant=False)
    classification(model, (3,)).check(second=False)
    with pytest.raises(BridgeError, match=r"checkpoint.*into a module"):
        classification(model, (3,)).run(DiagGGNExact())


def test_reentrant_checkpoint_first_order() -> None:
    model = Checkpointed(block(), reentrant=False)
    problem = classification(model, (3,))
    expected = problem.expected(oracle.individual_gradients)
    model.reentrant = True
    problem.run(BatchGrad())
    problem.compare("grad_batch", expected)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_reentrant_checkpoint_of_a_shared_layer(extension: Any) -> None:
    """What lies inside is a graph of its own, so that the other use is not seen from there."""
    model = Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), reentrant=True)
    model.last = nn.Sequential(model.block[0], nn.Linear(4, 3))
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        classification(model, (3,)).run(extension())


def test_reentrant_checkpoint_second_order() -> None:
    with pytest.raises(BridgeError, match="use_reentrant=False"):
        classification(Checkpointed(block(), reentrant=True), (3,)).run(DiagGGNExact())


def test_error_of_a_node_is_not_hidden() -> None:
    class Broken(Cube):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("broken on purpose")

    model = Net(lambda net, x: net.b(Broken.apply(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match="broken on purpose"):
        classification(model, (3,)).run(DiagGGNExact())


def test_gradient_hooks_of_the_user_leave_no_curvature() -> None:
    """What they differentiate is no function."""

    def doubled(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: 2 * grad)
        return x

    model = Net(lambda net, x: net.b(doubled(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3))
    problem = classification(model, (3,))
    with pytest.raises(UnsupportedError, match="Linear 'a' is changed by a hook on that tensor"):
        problem.run(DiagGGNExact())


def test_full_backward_hooks_of_the_user() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    seen: list[str] = []
    problem = classification(model, (3,))
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    for module in model:
        module.register_full_backward_hook(lambda m, *_: seen.append(type(m).__name__))
    with pytest.warns(UserWarning, match="Full backward hook is firing"):
        problem.run(BatchGrad(), DiagGGNExact())
    problem.compare("grad_batch", gradients)
    problem.compare("diag_ggn_exact", diagonals)
    assert seen == ["Linear", "Tanh", "Linear"]


def test_two_inputs_of_one_module() -> None:
    model = Net(
        lambda net, x: net.c(net.bilinear(net.a(x), torch.sin(net.b(x)))),
        a=nn.Linear(3, 2),
        b=nn.Linear(3, 2),
        bilinear=nn.Bilinear(2, 2, 3),
        c=nn.Linear(3, 3),
    )
    classification(model, (3,)).check()


def test_bridge_of_extended_loss_with_functional_reduction() -> None:
    model, lossfunc = nn.Linear(3, 3), nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(4, 3), torch.randint(0, 3, (4,))
    weights = torch.rand(4)
    problem = Problem(
        model, (x,), Net(lambda net, o, t: weights @ F.cross_entropy(o, t, reduction="none")), y
    )
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    extend(model), extend(lossfunc)
    with backpack(DiagGGNExact()):
        (weights @ lossfunc(model(x), y)).backward()
    problem.compare("diag_ggn_exact", expected)
