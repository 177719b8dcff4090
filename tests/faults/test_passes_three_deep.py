"""Which backward pass another one belongs to: the innermost, if a function's backward began it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import GGNMP, HMP, BatchGrad, ClippedSumGrad, DiagGGNExact
from tests import oracle
from tests.faults.problems import clipped

BOUND = 0.3
Loss = Callable[[Tensor], Tensor]


def _nets(count: int) -> list[nn.Sequential]:
    layers = (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(count))
    return [extend(net) for net in layers]


def _x() -> Tensor:
    return torch.randn(5, 3)


def _gradients(loss: Loss, x: Tensor, *nets: nn.Module) -> list[Tensor]:
    parameters = [p for net in nets for p in net.parameters()]
    each = [torch.autograd.grad(loss(x[n : n + 1]), parameters) for n in range(len(x))]
    return [torch.stack(parts) for parts in zip(*each, strict=True)]


def _square(net: nn.Module) -> Loss:
    return lambda x: net(x).square().sum()  # type: ignore[no-any-return]


def _run(loss: Tensor, **options: Any) -> None:
    with backpack(BatchGrad(), ClippedSumGrad(BOUND, normaliser=None), **options):
        loss.backward()


def _compare(gradients: list[Tensor], *nets: nn.Module) -> None:
    """Individual gradients of one pass, and their sums with the norm over all that it reaches."""
    parameters: list[Any] = [p for net in nets for p in net.parameters()]
    sums = clipped(gradients, BOUND)
    for parameter, gradient, total in zip(parameters, gradients, sums, strict=True):
        oracle.assert_close(parameter.grad_batch, gradient)
        oracle.assert_close(parameter.grad_clipped, total)


def _again(function: Loss, x: Tensor) -> Tensor:
    """A re-entrant checkpoint."""
    found: Tensor = checkpoint(function, x.clone().requires_grad_(), use_reentrant=True)
    return found


def _with_hook(net: Any, x: Tensor, hook: Callable[[], None]) -> Tensor:
    """A net in whose backward pass a hook is called, with a graph if it wants one."""

    def call(_: Tensor) -> None:
        with torch.enable_grad():
            hook()

    hidden = net[1](net[0](x))
    if hidden.requires_grad:
        hidden.register_hook(call)
    found: Tensor = net[2](hidden)
    return found


def test_hooks_in_hooks() -> None:
    x, (first, second, third) = _x(), _nets(3)
    losses = [_square(net) for net in (first, second, third)]
    expected = [
        _gradients(loss, x, n) for loss, n in zip(losses, (first, second, third), strict=True)
    ]

    def inner() -> None:
        _with_hook(second, x, lambda: losses[2](x).backward()).square().sum().backward()

    _run(_with_hook(first, x, inner).square().sum())
    for gradients, net in zip(expected, (first, second, third), strict=True):
        _compare(gradients, net)


def test_a_checkpoint_in_a_pass_of_a_hook_is_a_part_of_that() -> None:
    x, (first, second, third) = _x(), _nets(3)
    expected = _gradients(lambda y: first(y).square().sum(), x, first)
    inside = _gradients(lambda y: second(third(y)).square().sum(), x, second, third)
    _run(
        _with_hook(first, x, lambda: second(_again(third, x)).square().sum().backward())
        .square()
        .sum()
    )
    _compare(expected, first)
    _compare(inside, second, third)


@pytest.mark.parametrize("same", [True, False])
def test_a_part_of_a_pass_that_is_not_known(same: bool) -> None:
    """Nothing of a hook's pass was seen before its checkpoint, nor may be after it."""
    x, (first, second) = _x(), _nets(2)
    inner = first if same else second
    loss = _with_hook(first, x, lambda: _again(inner, x).square().sum().backward()).square().sum()
    with pytest.raises(UnsupportedError, match="a part of a pass that a hook began"):
        _run(loss)


def test_a_hook_in_a_checkpoint_begins_a_pass_of_its_own() -> None:
    x, (first, second) = _x(), _nets(2)
    expected = [_gradients(_square(net), x, net) for net in (first, second)]

    def hooked(y: Tensor) -> Tensor:
        return _with_hook(first, y, lambda: second(x).square().sum().backward())

    _run(_again(hooked, x).square().sum())
    _compare(expected[0], first)
    _compare(expected[1], second)


def test_a_checkpoint_in_a_checkpoint() -> None:
    x, (first, second) = _x(), _nets(2)
    expected = _gradients(lambda y: second(first(y).sin()).square().sum(), x, first, second)

    def outer(y: Tensor) -> Tensor:
        return 1 * _again(second, first(y).sin())

    _run(_again(outer, x).square().sum())
    _compare(expected, first, second)


@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("same", [True, False])
def test_a_hook_that_begins_a_pass_before_anything_is_visited(same: bool, check: str) -> None:
    x, (first, second) = _x(), _nets(2)
    inner, other = first if same else second, torch.randn(4, 3)
    expected = _gradients(lambda y: (2 * first(y)).square().sum(), x, first)
    inside = _gradients(lambda y: inner(y).square().sum(), other, inner)
    doubled = 2 * first(x)
    inner_loss = inner(other).square().sum()
    doubled.register_hook(lambda _: inner_loss.backward())
    _run(doubled.square().sum(), check=check)
    _compare(expected, first)
    if not same:
        _compare(inside, inner)


@pytest.mark.parametrize("samples", [1, 5])
def test_a_net_in_checkpoints_alone(samples: int) -> None:
    """No module is in the graph of the loss; the parts of one pass share its norms."""
    x, nets = _x()[:samples], _nets(3)

    def loss(y: Tensor) -> Tensor:
        return nets[2](nets[1](nets[0](y))).square().sum()  # type: ignore[no-any-return]

    expected, other = _gradients(loss, x, *nets), _gradients(loss, 2 * x, *nets)
    for data, gradients in ((2 * x, other), (x, expected)):
        value = data
        for net in nets:
            value = _again(net, value)
        _run(value.square().sum())
        _compare(gradients, *nets)


def test_results_of_an_earlier_pass_through_checkpoints_are_removed() -> None:
    x, nets = _x(), _nets(2)
    model = extend(nn.ModuleList(nets))
    _run(_again(nets[1], _again(nets[0], x)).square().sum())
    _run(_again(nets[0], x).square().sum())
    assert all(hasattr(p, "grad_batch") for p in model[0].parameters())
    assert not any(hasattr(p, "grad_batch") for p in model[1].parameters())


def test_a_layer_in_two_checkpoints() -> None:
    x, (net,) = _x(), _nets(1)
    with pytest.raises(UnsupportedError, match=r"use_reentrant=False"):
        _run(_again(net, _again(net, x)).square().sum())


@pytest.mark.parametrize("is_extended", [True, False])
@pytest.mark.parametrize("extension", [HMP, GGNMP, DiagGGNExact])
def test_what_reads_the_whole_has_no_parts(extension: Any, is_extended: bool) -> None:
    x, (net,) = _x(), _nets(1)
    lossfunc = extend(nn.MSELoss()) if is_extended else nn.MSELoss()
    loss = lossfunc(_again(net, x), torch.zeros(5, 3))
    with pytest.raises(UnsupportedError, match="use_reentrant=False"), backpack(extension()):
        loss.backward()


def test_samples_that_mix_in_a_checkpoint() -> None:
    x, (first, second) = _x(), _nets(2)
    loss = _again(lambda y: second(first(y) - first(y).mean(0)), x).square().sum()
    with pytest.raises(UnsupportedError, match="influence each other"):
        _run(loss)


@pytest.mark.parametrize("gradient", ["autograd", "skipped"])
def test_an_observer_that_begins_a_pass(gradient: Any) -> None:
    """Also where autograd does not run, so that no pass of its own is around."""
    x, (first, second) = _x(), _nets(2)
    inside, todo = _gradients(_square(second), x, second), [second]
    lossfunc = extend(nn.MSELoss())

    def observe(view: Any) -> None:
        if todo and view.module is first[1]:
            net = todo.pop()
            with torch.enable_grad(), backpack(BatchGrad(), ClippedSumGrad(BOUND, normaliser=None)):
                net(x).square().sum().backward()

    loss = lossfunc(first(x), torch.zeros(5, 3))
    with backpack(DiagGGNExact(), observer=observe, gradient=gradient):
        loss.backward()
    assert all(hasattr(p, "diag_ggn_exact") for p in first.parameters())
    _compare(inside, second)


@pytest.mark.parametrize("gradient", ["autograd", "skipped"])
def test_an_observer_that_begins_a_pass_of_the_same_block(gradient: Any) -> None:
    x, (first, second) = _x(), _nets(2)
    lossfunc, todo = extend(nn.MSELoss()), [second]

    def begin(view: Any) -> None:
        if todo and view.module is first[1]:
            with torch.enable_grad():
                lossfunc(todo.pop()(x), x.new_zeros(5, 3)).backward()

    loss = lossfunc(first(x), torch.zeros(5, 3))
    with backpack(DiagGGNExact(), observer=begin, gradient=gradient):
        loss.backward()
    assert all(hasattr(p, "diag_ggn_exact") for net in (first, second) for p in net.parameters())
