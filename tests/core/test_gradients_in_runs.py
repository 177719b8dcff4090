"""Where each entry belongs to one sample, autograd's gradient takes the place of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import BatchDotGrad, BatchGrad, SumGradSquared
from backpack_operations import bridge
from backpack_operations.alignment_walk import Walk
from tests.core.test_runs import NETS, N, Net, _modulated, _weights

Forward = Callable[[Any, Tensor], Tensor]


def _as_inputs(net: Any, z: Tensor) -> Any:
    """Weights for each sample that a module and an operation receive."""
    weight = _weights(net, z)
    return net.layer(weight.flatten(3)) + F.silu(weight.flatten(3)) * net.gain


def _mixed(net: Any, z: Tensor) -> Any:
    """A tensor in runs that two operations use, one with the samples on axis 0, one with none."""
    weight = (net.weight[0] + 1).repeat(len(z), 1, 1, 1)  # [N * O, I, 2, 2]
    x = net.table.expand(len(z), -1, -1, -1).reshape(1, -1, 3, 3)
    found = F.conv2d(x, weight, groups=len(z)).view(len(z), 2, 2, 2)
    return found * net.code(z)[:, :2, None, None] + weight.view(len(z), 2, 2, 2, 2).square().sum(2)


ALL = [*NETS, _as_inputs, _mixed]


def _fields(net: nn.Module, name: str) -> list[Tensor]:
    return [getattr(p, name) for p in net.parameters() if hasattr(p, name)]


def _pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen, push = list[str](), bridge.push

    def noting(node: Any, *given: Any) -> Any:
        seen.append(node.name())
        return push(node, *given)

    monkeypatch.setattr(bridge, "push", noting)
    return seen


def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are pushed through every operation."""
    monkeypatch.setattr(Walk, "_find_runs", lambda *args: None)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("forward", ALL)
def test_numbers_are_those_of_columns(
    forward: Forward, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, loss = Net(forward), extend(nn.CrossEntropyLoss(reduction=reduction))
    second = extend(Net(forward))
    second.load_state_dict(first.state_dict())
    extend(first)
    for _ in range(5):  # planned passes among them
        z, y = torch.randn(N, 4), torch.randint(2, (N,))
        for net in (first, second):
            with monkeypatch.context() as changed:
                if net is second:
                    _without(changed)
                with backpack(BatchGrad(), BatchDotGrad()):
                    loss(net(z), y).backward()
        for name in ("grad_batch", "batch_dot"):
            ours, plain = _fields(first, name), _fields(second, name)
            assert len(ours) == len(plain) > 4
            for one, other in zip(ours, plain, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("forward", "subsampling"),
    [*[(forward, some) for forward in ALL for some in ([1], [2, 0])], (_modulated, [1, 1, 0])],
)
def test_some_samples(forward: Forward, subsampling: list[int]) -> None:
    net, loss = extend(Net(forward)), extend(nn.CrossEntropyLoss())
    z, y = torch.randn(N, 4), torch.randint(2, (N,))
    found = []
    for chosen in (None, subsampling):
        with backpack(BatchGrad(subsampling=chosen)):
            loss(net(z), y).backward()
        found.append(_fields(net, "grad_batch"))
    for whole, some in zip(*found, strict=True):
        torch.testing.assert_close(some, whole[subsampling])


def test_operations_are_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, loss, counts = extend(Net(_modulated)), extend(nn.MSELoss()), []
    for without in (False, True):
        with monkeypatch.context() as changed:
            if without:
                _without(changed)
                net = extend(Net(_modulated))
            seen = _pushed(changed)
            for _ in range(5):
                seen.clear()
                with backpack(BatchGrad()):
                    loss(net(torch.randn(N, 4)), torch.randn(N, 2)).backward()
            counts.append(seen.copy())
    assert not any("Convolution" in name or "Upsample" in name for name in counts[0]), counts[0]
    assert "ConvolutionBackward0" in counts[1]
    assert len(counts[0]) < len(counts[1]) / 2


def test_hooks_that_change_gradients() -> None:
    def hooked(net: Any, z: Tensor) -> Any:
        weight = _weights(net, z)
        weight.register_hook(lambda gradient: 3 * gradient)
        x = net.table.expand(len(z), -1, -1, -1).reshape(1, -1, 3, 3)
        return F.conv2d(x, weight.flatten(0, 1), groups=len(z)).view(len(z), 2, 2, 2)

    net, loss = extend(Net(hooked)), extend(nn.MSELoss())
    with backpack(BatchGrad()):
        loss(net(torch.randn(N, 4)), torch.randn(N, 2)).backward()
    assert len(_fields(net, "grad_batch")) == 6
    for p in net.parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)  # type: ignore[attr-defined]


@pytest.mark.parametrize("forward", ALL)
def test_in_a_pass_that_a_hook_begins(forward: Forward) -> None:
    net, loss = extend(Net(forward)), extend(nn.CrossEntropyLoss())
    z, y = torch.randn(N, 4), torch.randint(2, (N,))
    with backpack(BatchGrad(), SumGradSquared()):
        loss(net(z), y).backward()
    expected = _fields(net, "grad_batch")
    outer = torch.ones(1, requires_grad=True) * 2
    value = loss(net(z), y)
    outer.register_hook(lambda gradient: value.backward())
    with backpack(BatchGrad(), SumGradSquared()):
        outer.backward()
    for mine, other in zip(_fields(net, "grad_batch"), expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_with_a_graph_of_gradients() -> None:
    net, loss = extend(Net(_modulated)), extend(nn.MSELoss())
    z, y = torch.randn(N, 4), torch.randn(N, 2)
    value = loss(net(z), y)
    with backpack(BatchGrad()):
        value.backward(create_graph=True)
    total = sum(field.square().sum() for field in _fields(net, "grad_batch"))
    (found,) = torch.autograd.grad(total, net.weight)  # type: ignore[arg-type]
    used = [p for p in net.parameters() if hasattr(p, "grad_batch")]
    total = torch.zeros(())
    for n in range(N):
        outputs = net(z[n : n + 1])
        each = (outputs - y[n : n + 1]).square().sum() / y.numel()
        rows = torch.autograd.grad(each, used, create_graph=True)
        total = total + sum(row.square().sum() for row in rows)
    (expected,) = torch.autograd.grad(total, net.weight)
    torch.testing.assert_close(found, expected)
