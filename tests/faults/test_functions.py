"""Functions with a backward pass of the user's own between modules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from backpack_core import backpack, disable, extend, unextend
from backpack_core.errors import BackpackError
from backpack_core.extensions import KFAC, BatchGrad, DiagGGNExact, DiagGGNMC, SumGradSquared
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.faults.problems import KINDS, check

pytestmark = [
    pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning"),
    pytest.mark.filterwarnings("ignore::backpack_core.errors.UncoveredParameterWarning"),
]


class Function(torch.autograd.Function):
    """What all have in common: a factor kept on the context."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, ctx.factor * grads[0]


class Scale(Function):
    """A number first."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> Tensor:
        ctx.factor = factor
        return factor * x


class ScaleOnce(Scale):
    """Without a second derivative."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.factor * grad


class ScaleNew(Function):
    """With the context in a function of its own, and support for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: float, x: Tensor) -> Tensor:
        return factor * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[float, Tensor], output: Tensor) -> None:
        ctx.factor = inputs[0]


class ScaleNumpy(Scale):
    """Through another library, which vmap cannot see into."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, torch.from_numpy(ctx.factor * grad.numpy())


class ScaleInPlace(Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> Tensor:
        ctx.factor = factor
        ctx.mark_dirty(x)
        return x.mul_(factor)


class Cube(torch.autograd.Function):
    """Nonlinear; the argument comes after three that are no tensors."""

    @staticmethod
    def forward(ctx: Any, name: str, nothing: None, shape: tuple[int, ...], x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, None, None, 3 * x**2 * grad


class Weigh(torch.autograd.Function):
    """Numbers between tensors, of which one is a constant and one a parameter."""

    @staticmethod
    def forward(
        ctx: Any, constant: Tensor, factor: float, x: Tensor, flag: bool, weight: Tensor
    ) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(constant, x, weight)
        return factor * constant * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        constant, x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        by_x = ctx.factor * constant * weight * grad
        by_weight = (ctx.factor * constant * x * grad).sum(0) if needs[4] else None
        return None, None, by_x, None, by_weight


class Pair(torch.autograd.Function):
    """Two outputs of a number and two tensors."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        return factor * x + y, factor * y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        return None, ctx.factor * first, first + ctx.factor * second


class Unmaterialised(torch.autograd.Function):
    """Sees ``None`` where an output got no gradient."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.factor = factor
        return factor * x, 2 * x

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        parts = [f * g for f, g in ((ctx.factor, first), (2.0, second)) if g is not None]
        return None, sum(parts) if parts else None


class Largest(torch.autograd.Function):
    """An output of integers, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> tuple[Tensor, Tensor]:
        index = x.argmax(1)
        ctx.mark_non_differentiable(index)
        ctx.factor = factor
        return index, factor * x

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> Any:
        return None, ctx.factor * grad


class Gather(torch.autograd.Function):
    """A tensor of integers first."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, count: int, x: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return x[:, index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return None, None, torch.zeros_like(grad).index_add(1, index, grad)


class Reshape(torch.autograd.Function):
    """A tuple first; the gradient has another shape."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.reshape(len(x), *shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad.reshape(ctx.shape)


class OneSided(torch.autograd.Function):
    """The second tensor gets no gradient, whatever it needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return 2 * x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad, None


class Opaque(torch.autograd.Function):
    """No gradient at all."""

    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> Tensor:
        return factor * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


Operation = Callable[[Tensor], Tensor]
# [N, 4] -> [N, *] of four features
OPERATIONS: dict[str, Operation] = {
    "number": lambda h: Scale.apply(2.0, h),
    "twice": lambda h: Scale.apply(2.0, h) * Scale.apply(0.5, h.sin()),
    "once": lambda h: ScaleOnce.apply(2.0, h),
    "new": lambda h: ScaleNew.apply(2.0, h),
    "numpy": lambda h: ScaleNumpy.apply(2.0, h),
    "in_place": lambda h: ScaleInPlace.apply(2.0, h * 1.0),
    "in_place_of_the_output": lambda h: ScaleInPlace.apply(2.0, h),
    "nonlinear": lambda h: Cube.apply("cube", None, (3,), h),
    "constants": lambda h: Weigh.apply(torch.arange(4.0), 2.0, h, True, torch.ones(4)),
    "pair": lambda h: sum(Pair.apply(2.0, h, h.tanh())),
    "pair_first": lambda h: Pair.apply(2.0, h, h.tanh())[0],
    "pair_second": lambda h: Pair.apply(2.0, h, h.tanh())[1],
    "unmaterialised": lambda h: Unmaterialised.apply(3.0, h)[0],
    "unmaterialised_second": lambda h: Unmaterialised.apply(3.0, h)[1],
    "integers": lambda h: Largest.apply(2.0, h)[1],
    "index": lambda h: Gather.apply(torch.tensor([2, 0, 0, 1]), 4, h),
    "tuple": lambda h: Reshape.apply((2, 2), h),
    "one_sided": lambda h: OneSided.apply(h, h.sin()),
    "opaque": lambda h: Opaque.apply(2.0, h) + h,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_between_modules(name: str, kind: str) -> None:
    net = Net(
        lambda net, x: net.last(OPERATIONS[name](net.first(x)).flatten(1)),
        first=nn.Linear(3, 4),
        last=nn.Linear(4, 3),
    )
    check(classification(net, (3,)), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_inside_a_module_without_a_rule(name: str, kind: str) -> None:
    own = Net(lambda net, x: OPERATIONS[name](x * net.w), w=nn.Parameter(torch.randn(4)))
    layers = [nn.Linear(3, 4), own, nn.Flatten(), nn.Linear(4, 3)]
    check(classification(nn.Sequential(*layers), (3,)), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "reduction"), [(1, "mean"), (4, "sum")])
def test_settings(batch: int, reduction: str, kind: str) -> None:
    net = Net(
        lambda net, x: net.last(OPERATIONS["nonlinear"](OPERATIONS["pair"](net.first(x)))),
        first=nn.Linear(3, 4),
        last=nn.Linear(4, 3),
    )
    check(classification(net, (3,), batch, reduction=reduction), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_among_the_arguments(kind: str) -> None:
    own = Net(
        lambda net, x: Weigh.apply(torch.arange(1.0, 5.0), 2.0, x, True, net.w),
        w=nn.Parameter(torch.randn(4)),
    )
    check(classification(nn.Sequential(nn.Linear(3, 4), own, nn.Linear(4, 3)), (3,)), kind)


# Behind a gradient of ``None`` there is nothing: a quantity of zero, or none.


def compare_or_nothing(problem: Problem, kind: str) -> None:
    """Compare all parameters that have a gradient; the others have zeros at most."""
    problem.run(BatchGrad() if kind == "gradients" else DiagGGNExact())
    field = "grad_batch" if kind == "gradients" else "diag_ggn_exact"
    if kind == "gradients":
        expected = problem.expected(oracle.individual_gradients)
    else:
        expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    for p, values in zip(problem.parameters, expected, strict=True):
        found = getattr(p, field, None)
        if found is None:
            assert not values.any()
        else:
            oracle.assert_close(found, values)


NOTHING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "branch": lambda net, x: net.last(OneSided.apply(net.first(x), net.inner(net.first(x)))),
    "only": lambda net, x: net.last(Opaque.apply(2.0, net.inner(net.first(x)))),
}


INNER: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "activation": nn.Tanh,
    "own": lambda: Net(lambda net, x: x * net.w, w=nn.Parameter(torch.randn(4))),
}


@pytest.mark.parametrize("kind", ["gradients", "curvature"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", NOTHING)
def test_no_gradient(name: str, inner: str, kind: str) -> None:
    parts = {"first": nn.Linear(3, 4), "inner": INNER[inner](), "last": nn.Linear(4, 3)}
    compare_or_nothing(classification(Net(NOTHING[name], **parts), (3,)), kind)


# A home-made checkpoint: its backward formula runs a pass, and fills ``grad`` of what is inside.


class HomemadeCheckpoint(torch.autograd.Function):
    """The function first."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        output.backward(grad)
        return None, x.grad


class HomemadeCheckpointOfTensor(HomemadeCheckpoint):
    """The tensor first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return HomemadeCheckpoint.forward(ctx, function, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return HomemadeCheckpoint.backward(ctx, grad)[::-1]


class Checkpointed(nn.Module):
    """Two layers, and two modules under a checkpoint between them."""

    def __init__(self, inside: str, order: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.inside, self.order, self.is_plain = inside, order, False

    def run(self, x: Tensor) -> Tensor:
        """What is computed twice."""
        if self.inside == "functions":
            linear: Any = self.inner[0]
            return F.linear(x, linear.weight, linear.bias).tanh()
        with disable() if self.inside == "disabled" else nullcontext():
            result: Tensor = self.inner(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.is_plain:
            hidden = self.run(hidden)
        elif self.order == "function_first":
            hidden = HomemadeCheckpoint.apply(self.run, hidden)
        else:
            hidden = HomemadeCheckpointOfTensor.apply(hidden, self.run)
        result: Tensor = self.last(hidden)
        return result


def checkpointed(inside: str, order: str) -> tuple[Problem, list[Tensor]]:
    """The problem, extended, and individual gradients."""
    model = Checkpointed(inside, order)
    problem = classification(model, (3,))
    model.is_plain = True
    gradients = problem.expected(oracle.individual_gradients)
    model.is_plain = False
    extend(model), extend(problem.lossfunc)
    if inside == "not_extended":
        unextend(model.inner)
    return problem, gradients


INSIDE = pytest.mark.parametrize("inside", ["modules", "not_extended", "functions", "disabled"])
ORDER = pytest.mark.parametrize("order", ["function_first", "tensor_first"])


@INSIDE
@ORDER
def test_gradients_through_a_homemade_checkpoint(inside: str, order: str) -> None:
    """Of the layers outside in any case, and of those inside where they are computed."""
    problem, gradients = checkpointed(inside, order)
    loss = problem.lossfunc(problem.model(*problem.inputs), problem.target)
    with backpack(BatchGrad(), SumGradSquared()):
        loss.backward()
    problem.compare("grad", [g.sum(0) for g in gradients])
    for (name, p), values in zip(problem.model.named_parameters(), gradients, strict=True):
        if not name.startswith("inner") or hasattr(p, "grad_batch"):
            oracle.assert_close(p.grad_batch, values)
            oracle.assert_close(p.sum_grad_squared, values.square().sum(0))


CURVATURE: dict[str, Callable[[], Any]] = {
    "exact": DiagGGNExact,
    "columns": lambda: DiagGGNExact(chunk_size=1),
    "sampled": DiagGGNMC,
    "factors": KFAC,
}


@INSIDE
@ORDER
@pytest.mark.parametrize("extension", CURVATURE)
def test_curvature_through_a_homemade_checkpoint(inside: str, order: str, extension: str) -> None:
    """The error names the function, and ``grad`` holds nothing that is wrong."""
    problem, gradients = checkpointed(inside, order)
    loss = problem.lossfunc(problem.model(*problem.inputs), problem.target)
    with (
        pytest.raises(BackpackError, match="HomemadeCheckpoint"),
        backpack(CURVATURE[extension]()),
    ):
        loss.backward()
    for p, values in zip(problem.parameters, gradients, strict=True):
        if p.grad is not None:
            oracle.assert_close(p.grad, values.sum(0))
