"""The plain gradient as the sum of individual ones, and left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.engine import gradient as module_of_gradients
from backpack_core.errors import BackpackWarning, UsageError
from backpack_core.extensions import (
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    SumGradSquared,
    Variance,
)
from tests import oracle
from tests.cases import Net

PASSES = 5  # the first, and 1, 2, 4, … after it, are judged by autograd's gradient


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 3)
    )


def token_net() -> nn.Module:
    return Net(
        lambda net, x: net.c(net.norm(net.a(x) + net.b(torch.tanh(net.a(x)))).mean(1)),
        a=nn.Linear(2, 4),
        b=nn.Linear(4, 4),
        norm=nn.LayerNorm(4),
        c=nn.Linear(4, 3),
    )


class _Step:
    """Passes of a model and its plain copy, side by side."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], samples: int = 4) -> None:
        self.plain = model
        self.extended = extend(copy.deepcopy(model))
        self.lossfunc = extend(nn.CrossEntropyLoss())
        self.shape, self.samples = shape, samples
        self.left: list[int] = []  # how many parameters autograd left out, pass by pass

    def data(self) -> tuple[Tensor, Tensor]:
        return torch.randn(self.samples, *self.shape), torch.randint(0, 3, (self.samples,))

    def run(self, *extensions: Any, mode: Any = "shared", **options: Any) -> None:
        """One pass of both."""
        x, y = self.data()
        nn.CrossEntropyLoss()(self.plain(x), y).backward(**options)
        loss = self.lossfunc(self.extended(x), y)
        with self.watching(), backpack(*extensions, gradient=mode):
            loss.backward(**options)

    @contextmanager
    def watching(self) -> Iterator[None]:
        inputs_without = module_of_gradients.inputs_without
        found: list[int] = []

        def watched(left: Any, *args: Any) -> Any:
            found.append(len(left))
            return inputs_without(left, *args)

        module_of_gradients.inputs_without = watched
        try:
            yield
        finally:
            module_of_gradients.inputs_without = inputs_without
            self.left.append(sum(found))

    def compare(self) -> None:
        for ours, theirs in zip(self.extended.parameters(), self.plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None and theirs.grad is not None:
                oracle.assert_close(ours.grad, theirs.grad)
                assert not ours.grad.requires_grad

    def check(self, *extensions: Any, **options: Any) -> None:
        """Several passes, each with gradients of its own; some are shared."""
        for _ in range(PASSES):
            self.plain.zero_grad()
            self.extended.zero_grad()
            self.run(*extensions, **options)
            self.compare()


QUANTITIES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "individual": lambda: (BatchGrad(),),
    "moment": lambda: (SumGradSquared(),),
    "variance": lambda: (Variance(),),
    "four": lambda: (BatchGrad(), Variance(), SumGradSquared(), BatchL2Grad()),
    "with curvature": lambda: (BatchGrad(), DiagGGNExact()),
    "clipped": lambda: (ClippedSumGrad(1.0), BatchGrad()),
    "norms": lambda: (BatchL2Grad(),),
    "norms and moments": lambda: (BatchL2Grad(), SumGradSquared()),
    "clipped alone": lambda: (ClippedSumGrad(1.0),),
}


@pytest.mark.parametrize("net", [conv_net, token_net])
@pytest.mark.parametrize("name", QUANTITIES)
def test_sums_are_autograds_gradient(name: str, net: Any) -> None:
    step = _Step(net(), (2, 5, 5) if net is conv_net else (9, 2))
    step.check(*QUANTITIES[name]())
    assert [bool(left) for left in step.left] == [False, False, False, True, False]


def test_quantities_are_the_same() -> None:
    step = _Step(conv_net(), (2, 5, 5))
    for _ in range(PASSES):
        step.run(BatchGrad(), Variance())
        if not step.left[-1]:
            continue
        shared = [(p.grad_batch, p.variance) for p in step.extended.parameters()]
        for parameter, (individual, variance) in zip(
            step.extended.parameters(), shared, strict=True
        ):
            oracle.assert_close(variance, individual.var(0, correction=0))
            assert parameter.grad is not None
            memories = {t.data_ptr() for t in (parameter.grad, individual, variance)}
            assert len(memories) == 3


def test_of_some_samples_autograd_computes() -> None:
    step = _Step(conv_net(), (2, 5, 5))
    step.check(BatchGrad(subsampling=[0, 2]))
    assert not any(step.left)


@pytest.mark.parametrize(("positions", "shared"), [(9, ["weight", "bias"]), (2, ["bias"])])
def test_norms_are_shared_where_products_cost_less(positions: int, shared: list[str]) -> None:
    """Gram matrices over few positions need no product, and autograd has the sum then."""
    step = _Step(Net(lambda net, x: net.a(x).mean(1), a=nn.Linear(40, 3)), (positions, 40))
    step.check(BatchL2Grad())
    assert max(step.left) == len(shared)


def test_gradients_accumulate() -> None:
    step = _Step(token_net(), (9, 2))
    for _ in range(PASSES):
        step.run(BatchGrad())
        step.compare()
    assert any(step.left)


def test_retained_graphs() -> None:
    step = _Step(token_net(), (9, 2))
    x, y = step.data()
    plain = nn.CrossEntropyLoss()(step.plain(x), y)
    loss = step.lossfunc(step.extended(x), y)
    for turn in range(PASSES):
        plain.backward(retain_graph=turn < PASSES - 1)
        with (
            step.watching(),
            backpack(BatchGrad(), gradient="shared", retain_graph=turn < PASSES - 1),
        ):
            loss.backward(retain_graph=turn < PASSES - 1)
        step.compare()
    assert any(step.left)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_with_a_graph_autograd_computes_and_it_is_said() -> None:
    step = _Step(token_net(), (9, 2))
    with pytest.warns(BackpackWarning, match="create_graph"):
        _differentiable_passes(step)
    assert all(p.grad is not None and p.grad.requires_grad for p in step.extended.parameters())
    assert not any(step.left)
    for parameter in step.extended.parameters():  # a gradient with a graph is a cycle
        parameter.grad = None


def _differentiable_passes(step: _Step) -> None:
    for _ in range(PASSES):
        step.extended.zero_grad()
        x, y = step.data()
        with step.watching(), backpack(BatchGrad(), gradient="shared"):
            step.lossfunc(step.extended(x), y).backward(create_graph=True)


def test_hooks_on_parameters() -> None:
    step = _Step(token_net(), (9, 2))
    seen: dict[str, list[Tensor]] = {}

    def install(model: nn.Module, name: str) -> None:
        seen[name] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: 3 * grad)
            parameter.register_post_accumulate_grad_hook(
                lambda p: seen[name].append(p.grad.clone())  # type: ignore[union-attr]
            )

    install(step.plain, "plain")
    install(step.extended, "extended")
    step.check(BatchGrad())
    assert any(step.left)
    assert len(seen["plain"]) == len(seen["extended"]) == PASSES * 8


def test_a_pass_in_a_hook_on_a_parameter() -> None:
    """It is inside of the pass that hands the gradient on, and removes none of its results."""
    step, other = _Step(token_net(), (9, 2)), _Step(token_net(), (9, 2))
    step.check(BatchGrad())
    step.check(BatchGrad())
    other.run(BatchGrad())
    before = [p.grad_batch for p in other.extended.parameters()]
    losses: list[Tensor] = []

    def begin(grad: Tensor) -> None:
        if losses:
            losses.pop().backward()

    handle = step.extended.a.weight.register_hook(begin)  # type: ignore[union-attr, operator]
    for _ in range(3):
        other.extended.zero_grad()
        x, y = other.data()
        losses.append(other.lossfunc(other.extended.c(x.new_ones(4, 4)), y))
        step.run(BatchGrad())
        assert not losses
    handle.remove()
    assert step.left[-1]
    for parameter, value in zip([*other.extended.parameters()][:6], before, strict=False):
        assert parameter.grad_batch is value
    assert other.extended.c.weight.grad is not None  # type: ignore[union-attr]


def test_hooks_between_modules() -> None:
    net = Net(
        lambda net, x: net.c(net.hooked(net.a(x)).mean(1)), a=nn.Linear(2, 4), c=nn.Linear(4, 3)
    )
    seen: list[Tensor] = []

    def hooked(x: Tensor) -> Tensor:
        x.register_hook(seen.append)
        x.register_hook(lambda grad: 2 * grad)
        return x

    net.hooked = hooked
    step = _Step(net, (9, 2))
    step.check(BatchGrad())
    assert any(step.left)
    assert len(seen) == 2 * PASSES


def test_tied_weights() -> None:
    model = token_net()
    model.b.weight = nn.Parameter(torch.randn(4, 4))
    model.extra = nn.Linear(4, 4)
    model.extra.weight = model.b.weight
    model.function = lambda net, x: net.c(net.extra(net.b(net.norm(net.a(x)))).mean(1))
    step = _Step(model, (9, 2))
    step.check(BatchGrad())
    assert any(step.left)


def test_a_branch_that_no_gradient_reaches() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    model = token_net()
    model.function = lambda net, x: net.c((net.a(x) + Nothing.apply(net.b(net.a(x)))).mean(1))
    step = _Step(model, (9, 2))
    step.check(BatchGrad())
    assert any(step.left)


def test_frozen_parameters() -> None:
    model = token_net()
    model.a.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    step = _Step(model, (9, 2))
    step.check(BatchGrad())
    assert any(step.left)


def test_a_term_beside_the_loss() -> None:
    """A penalty on weights: a parameter that is used outside of its module."""
    step = _Step(token_net(), (9, 2))
    for _ in range(PASSES):
        step.plain.zero_grad()
        step.extended.zero_grad()
        x, y = step.data()
        for model, lossfunc in (
            (step.plain, nn.CrossEntropyLoss()),
            (step.extended, step.lossfunc),
        ):
            free = torch.ones(3, requires_grad=True)
            loss = lossfunc(model(x) * free, y)
            if model is step.plain:
                loss.backward()
                expected = free.grad
                continue
            with step.watching(), backpack(BatchGrad(), gradient="shared"):
                loss.backward()
            oracle.assert_close(free.grad, expected)
        step.compare()
    assert any(step.left)


@pytest.mark.filterwarnings("ignore:A parameter of shape")
def test_a_parameter_as_an_input_of_a_module() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(9, 4))
            self.a, self.act, self.c = nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.c(
                (self.a(x) * self.act(self.scale.expand(len(x), -1, -1))).mean(1)
            )
            return result

    model = Scaled()
    plain, extended = model, copy.deepcopy(model)
    for part in (extended.a, extended.c):
        extend(part)
    lossfunc = extend(nn.CrossEntropyLoss())
    for _ in range(PASSES):
        x, y = torch.randn(4, 9, 2), torch.randint(0, 3, (4,))
        plain.zero_grad()
        extended.zero_grad()
        nn.CrossEntropyLoss()(plain(x), y).backward()
        loss = lossfunc(extended(x), y)
        with backpack(BatchGrad(), gradient="shared"):
            loss.backward()
        for ours, theirs in zip(extended.parameters(), plain.parameters(), strict=True):
            oracle.assert_close(ours.grad, theirs.grad)


def test_several_outputs_and_gates() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.c = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            states, (last, _) = self.lstm(x)
            result: Tensor = self.c(states.mean(1) + last.squeeze(0))
            return result

    step = _Step(Recurrent(), (9, 2))
    step.check(BatchGrad())
    assert any(step.left)


def test_a_rule_that_misses_a_use_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's gradient judges: where the sum is another one, it stays autograd's."""
    step = _Step(token_net(), (9, 2))
    original = module_of_gradients.batch_sum
    monkeypatch.setattr(module_of_gradients, "batch_sum", lambda product: 1.001 * original(product))
    for _ in range(PASSES):
        step.plain.zero_grad()
        step.extended.zero_grad()
        step.run(BatchGrad())
        step.compare()
    assert not any(step.left)


def test_structures_are_judged_one_by_one() -> None:
    step = _Step(token_net(), (9, 2))
    step.check(BatchGrad())
    step.extended.eval()
    step.plain.eval()
    step.check(BatchGrad())
    step.check(SumGradSquared())
    assert [bool(left) for left in step.left] == 3 * [False, False, False, True, False]


def test_half_precision_is_autograds() -> None:
    step = _Step(token_net().bfloat16(), (9, 2))
    for _ in range(PASSES):
        x, y = step.data()
        with step.watching(), backpack(BatchGrad(), gradient="shared"):
            step.lossfunc(step.extended(x.bfloat16()), y).backward()
    assert not any(step.left)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpoints(is_reentrant: bool) -> None:
    model = token_net()
    model.function = lambda net, x: net.c(
        checkpoint(net.b, net.a(x), use_reentrant=is_reentrant).mean(1)
    )
    step = _Step(model, (9, 2))
    with pytest.warns(BackpackWarning, match="checkpoint"):
        step.check(BatchGrad())
    assert not any(step.left)


def test_inputs_that_the_user_names() -> None:
    step = _Step(token_net(), (9, 2))
    for mode in ("shared", "none"):
        for _ in range(PASSES):
            step.extended.zero_grad()
            x, y = step.data()
            loss = step.lossfunc(step.extended(x), y)
            chosen = [*step.extended.parameters()][:2]
            with backpack(BatchGrad(), gradient=mode):  # type: ignore[arg-type]
                loss.backward(inputs=chosen)
            assert all(p.grad is not None for p in chosen)
            assert all(p.grad is None for p in [*step.extended.parameters()][2:])


def test_gradients_that_are_returned() -> None:
    step = _Step(token_net(), (9, 2))
    for mode in ("shared", "none"):
        for _ in range(PASSES):
            x, y = step.data()
            names = [*step.plain.parameters()]
            expected = torch.autograd.grad(nn.CrossEntropyLoss()(step.plain(x), y), names)
            loss = step.lossfunc(step.extended(x), y)
            with backpack(BatchGrad(), gradient=mode):  # type: ignore[arg-type]
                found = torch.autograd.grad(loss, [*step.extended.parameters()])
            for ours, theirs in zip(found, expected, strict=True):
                oracle.assert_close(ours, theirs)


def test_transforms_step_aside() -> None:
    step = _Step(token_net(), (9, 2))
    step.check(BatchGrad())
    x, y = step.data()

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found = torch.func.functional_call(step.extended, values, (x.unsqueeze(0),))
        return F.cross_entropy(found, y.unsqueeze(0))

    values = {n: p.detach() for n, p in step.extended.named_parameters()}
    with backpack(BatchGrad(), gradient="shared"):
        step.lossfunc(step.extended(x), y).backward()
        found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(values, x, y)
    for name, parameter in step.extended.named_parameters():
        oracle.assert_close(found[name].mean(0), parameter.grad_batch.sum(0))


def test_a_failing_pass_leaves_gradients_alone() -> None:
    step = _Step(token_net(), (9, 2))
    step.check(BatchGrad())
    step.check(BatchGrad())
    before = [p.grad.clone() for p in step.extended.parameters() if p.grad is not None]
    x, y = step.data()
    output = step.extended(x)
    output.register_hook(_raise)
    with pytest.raises(RuntimeError, match="mine"), backpack(BatchGrad(), gradient="shared"):
        step.lossfunc(output, y).backward()
    for parameter, gradient in zip(step.extended.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
        assert not parameter._backward_hooks


def _raise(grad: Tensor) -> None:
    raise RuntimeError("mine")


# Left out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [conv_net, token_net])
def test_left_out(net: Any) -> None:
    model = extend(net())
    lossfunc = extend(nn.CrossEntropyLoss())
    x = torch.randn(4, *((2, 5, 5) if net is conv_net else (9, 2)), requires_grad=True)
    y = torch.randint(0, 3, (4,))
    for turn in range(PASSES):
        x.grad = None
        (expected,) = torch.autograd.grad(lossfunc(model(x), y), x)
        with backpack(BatchGrad(), ClippedSumGrad(0.1), gradient="none"):
            lossfunc(model(x), y).backward(retain_graph=turn == 1)
        assert x.grad is not None
        oracle.assert_close(x.grad, expected)
        gradients = torch.autograd.grad(lossfunc(model(x), y), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is None
            oracle.assert_close(parameter.grad_batch.sum(0), gradient)


def test_what_is_left_out_keeps_what_it_had() -> None:
    step = _Step(token_net(), (9, 2))
    step.run(mode="autograd")
    before = [p.grad.clone() for p in step.extended.parameters() if p.grad is not None]
    step.run(ClippedSumGrad(1.0), mode="none")
    for parameter, gradient in zip(step.extended.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_only_three_words() -> None:
    with pytest.raises(UsageError, match="gradient is one of"):
        backpack(BatchGrad(), gradient="free")  # type: ignore[arg-type]
