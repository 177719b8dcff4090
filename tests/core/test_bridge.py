"""Functional operations between modules: followed exactly, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, UnsupportedError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_operations.bridge import push
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.core.functional import OPERATIONS, Cube


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


def test_function_of_a_view_that_was_made_without_gradients() -> None:
    """It says that it needs a gradient, and leads nowhere."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = torch.randn(2, 1, requires_grad=True)
    with torch.no_grad():
        view = x.reshape(-1)
    output: Any = Cube.apply(view)  # type: ignore[no-untyped-call]
    node = output.grad_fn
    assert push(node, {0: torch.randn(3, 2)}) == {}


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


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # torch, but not torch 2.6
def test_full_backward_hooks_of_the_user() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    seen: list[str] = []
    problem = classification(model, (3,))
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    for module in model:
        module.register_full_backward_hook(lambda m, *_: seen.append(type(m).__name__))
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
