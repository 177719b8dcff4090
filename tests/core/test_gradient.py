"""The plain gradient as the sum of individual ones, and left out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import BackpackWarning
from backpack_core.extensions import (
    BatchGrad,
    BatchL2Grad,
    Variance,
)
from tests import oracle
from tests.cases import Net
from tests.core.side_by_side import PASSES, QUANTITIES, Step, conv_net, token_net


@pytest.mark.parametrize("net", [conv_net, token_net])
@pytest.mark.parametrize("name", QUANTITIES)
def test_sums_are_autograds_gradient(name: str, net: Any) -> None:
    step = Step(net(), (2, 5, 5) if net is conv_net else (9, 2))
    step.check(*QUANTITIES[name]())
    assert [bool(left) for left in step.left] == [False, False, True, False, True]


def test_quantities_are_the_same() -> None:
    step = Step(conv_net(), (2, 5, 5))
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
    step = Step(conv_net(), (2, 5, 5))
    step.check(BatchGrad(subsampling=[0, 2]))
    assert not any(step.left)


@pytest.mark.parametrize(("positions", "shared"), [(9, ["weight", "bias"]), (2, ["bias"])])
def test_norms_are_shared_where_products_cost_less(positions: int, shared: list[str]) -> None:
    """Gram matrices over few positions need no product, and autograd has the sum then."""
    step = Step(Net(lambda net, x: net.a(x).mean(1), a=nn.Linear(40, 3)), (positions, 40))
    step.check(BatchL2Grad())
    assert max(step.left) == len(shared)


def test_gradients_accumulate() -> None:
    step = Step(token_net(), (9, 2))
    for _ in range(PASSES):
        step.run(BatchGrad())
        step.compare()
    assert any(step.left)


def test_retained_graphs() -> None:
    step = Step(token_net(), (9, 2))
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
    step = Step(token_net(), (9, 2))
    with pytest.warns(BackpackWarning, match="create_graph"):
        _differentiable_passes(step)
    assert all(p.grad is not None and p.grad.requires_grad for p in step.extended.parameters())
    assert not any(step.left)
    for parameter in step.extended.parameters():  # a gradient with a graph is a cycle
        parameter.grad = None


def _differentiable_passes(step: Step) -> None:
    for _ in range(PASSES):
        step.extended.zero_grad()
        x, y = step.data()
        with step.watching(), backpack(BatchGrad(), gradient="shared"):
            step.lossfunc(step.extended(x), y).backward(create_graph=True)


def test_hooks_on_parameters() -> None:
    step = Step(token_net(), (9, 2))
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
    step, other = Step(token_net(), (9, 2)), Step(token_net(), (9, 2))
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
    step = Step(net, (9, 2))
    step.check(BatchGrad())
    assert any(step.left)
    assert len(seen) == 2 * PASSES


def test_tied_weights() -> None:
    model = token_net()
    model.b.weight = nn.Parameter(torch.randn(4, 4))
    model.extra = nn.Linear(4, 4)
    model.extra.weight = model.b.weight
    model.function = lambda net, x: net.c(net.extra(net.b(net.norm(net.a(x)))).mean(1))
    step = Step(model, (9, 2))
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
    step = Step(model, (9, 2))
    step.check(BatchGrad())
    assert any(step.left)


def test_frozen_parameters() -> None:
    model = token_net()
    model.a.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    step = Step(model, (9, 2))
    step.check(BatchGrad())
    assert any(step.left)


def test_a_term_beside_the_loss() -> None:
    """A penalty on weights: a parameter that is used outside of its module."""
    step = Step(token_net(), (9, 2))
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

    step = Step(Recurrent(), (9, 2))
    step.check(BatchGrad())
    assert any(step.left)
