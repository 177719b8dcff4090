"""Batch normalisation with constant statistics, against nets that have these as numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, UnsupportedError, UsageError
from backpack_core.extensions import KFLR, BatchGrad, DiagGGNExact, DiagHessian, SumGradSquared
from backpack_layers.batch_statistics import batch_statistics
from tests import oracle
from tests.cases import Net
from tests.secondorder.problems import hessians


def images() -> tuple[nn.Module, Tensor]:
    layers = [
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2, momentum=None), nn.Tanh(), nn.Flatten(),
        nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False), nn.Sigmoid(), nn.Linear(4, 3),
    ]  # fmt: skip
    return nn.Sequential(*layers), torch.randn(5, 1, 3, 3)


def residual() -> tuple[nn.Module, Tensor]:
    """The module is called twice, and by a keyword; no running statistics."""
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    forward = lambda net, x: net.last(x + net.norm(net.first(torch.tanh(net.norm(input=x)))))  # noqa: E731
    return Net(forward, first=nn.Linear(3, 3), norm=norm, last=nn.Linear(3, 3)), torch.randn(4, 3)


def with_numbers(net: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The net in eval mode, with the statistics of a batch in the order of calls."""
    found: list[tuple[Tensor, Tensor]] = []
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def note(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        given = [*args, *kwargs.values()][0].detach()
        axes = [a for a in range(given.dim()) if a != 1]
        found.append((given.mean(axes), given.var(axes, correction=0)))

    hooks = [norm.register_forward_pre_hook(note, with_kwargs=True) for norm in norms]
    net(x)
    for hook in hooks:
        hook.remove()
    called = iter(())

    def affine(module: nn.modules.batchnorm._BatchNorm, input: Tensor) -> Tensor:
        mean, variance = (t.reshape(-1, *[1] * (input.dim() - 2)) for t in next(called))
        y = (input - mean) / (variance + module.eps).sqrt()
        if module.weight is None:
            return y
        shape = mean.shape
        return y * module.weight.reshape(shape) + module.bias.reshape(shape)

    for norm in norms:
        norm.forward = affine.__get__(norm)

    def forward(x: Tensor) -> Tensor:
        nonlocal called
        called = iter(found)
        result: Tensor = net(x)
        return result

    return forward


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("make", [images, residual])
def test_against_numbers(make: Callable[[], tuple[nn.Module, Tensor]], reduction: str) -> None:
    torch.manual_seed(0)
    net, x = make()
    y = torch.arange(len(x)) % 3
    same, plain = copy.deepcopy(net), copy.deepcopy(net)
    forward = with_numbers(same, x)
    lossfunc = nn.CrossEntropyLoss(reduction=reduction)
    asked = forward, lambda out: nn.functional.cross_entropy(out, y, reduction=reduction)
    parameters = [*same.parameters()]
    gradients = oracle.individual_gradients(*asked, (x,), parameters)
    blocks = oracle.ggn(*asked, (x,), parameters)
    extend(net), extend(lossfunc)
    with batch_statistics(net, "constant"):
        output = net(x)
    oracle.assert_close(output, plain(x))
    for mine, theirs in zip(net.buffers(), plain.buffers(), strict=True):
        oracle.assert_close(mine, theirs)
    with backpack(BatchGrad(), SumGradSquared(), DiagGGNExact(), KFLR(), check="always"):
        lossfunc(output, y).backward()
    for p, g, block in zip(net.parameters(), gradients, blocks, strict=True):
        oracle.assert_close(p.grad_batch, g)
        oracle.assert_close(p.sum_grad_squared, g.square().sum(0))
        oracle.assert_close(p.grad, g.sum(0))
        oracle.assert_close(p.diag_ggn_exact.flatten(), block.sum(0).diagonal())
        if p.dim() == 1:
            oracle.assert_close(p.kflr[0], block.sum(0))


def test_hessian() -> None:
    torch.manual_seed(0)
    net, x = images()
    y = torch.arange(len(x)) % 3
    same = copy.deepcopy(net)
    forward, lossfunc = with_numbers(same, x), nn.CrossEntropyLoss()
    found = hessians(forward, lambda out: lossfunc(out, y), (x,), [*same.parameters()])
    extend(net), extend(lossfunc)
    with batch_statistics(net, "constant"), backpack(DiagHessian()):
        lossfunc(net(x), y).backward()
    for p, hessian in zip(net.parameters(), found, strict=True):
        oracle.assert_close(p.diag_h.flatten(), hessian.sum(0).diagonal())


def test_train_mode_stays_refused_around_the_block() -> None:
    net, lossfunc = extend(images()[0]), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(3, 1, 3, 3), torch.arange(3)
    hooks = [*net[1]._forward_pre_hooks], [*net[1]._forward_hooks]
    for _ in range(2):
        with pytest.raises(SampleMixingError), backpack(BatchGrad()):
            lossfunc(net(x), y).backward()
        with batch_statistics(net, "constant") as held:
            loss = lossfunc(held(x), y)
            assert net[1].training
        assert net[1].training
        assert hooks == ([*net[1]._forward_pre_hooks], [*net[1]._forward_hooks])
        with backpack(BatchGrad()):
            loss.backward()


def test_eval_mode_is_left_alone() -> None:
    net, lossfunc = extend(images()[0]).eval(), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(3, 1, 3, 3), torch.arange(3)
    with batch_statistics(net, "constant"):
        loss = lossfunc(net(x), y)
    assert torch.equal(loss, lossfunc(net(x), y))
    assert net[1].num_batches_tracked == 0


def test_a_forward_that_fails_leaves_nothing() -> None:
    net = extend(nn.Sequential(nn.BatchNorm1d(2)))
    before = net[0].running_mean
    with batch_statistics(net, "constant"):
        with pytest.raises(ValueError, match="more than 1 value"):
            net(torch.ones(1, 2))
        with pytest.raises(RuntimeError):
            net(torch.ones(3, 3))
    assert net[0].training
    assert net[0].running_mean is before


def test_hooks_that_change_the_input_come_first() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), torch.randn(5, 3)
    net[0].register_forward_pre_hook(lambda module, args: (args[0].exp(),))
    expected, variance = net(x), copy.deepcopy(net[0].running_var)
    net[0].reset_running_stats()
    extend(net)
    with batch_statistics(net, "constant"):
        oracle.assert_close(net(x), expected)
    oracle.assert_close(net[0].running_var, variance)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("way", ["autocast", "input", "model"])
def test_half_precision(way: str, affine: bool) -> None:
    """An input of half precision with a module in single precision, as under autocast."""
    half = torch.bfloat16
    net = extend(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 2)))
    net = net.to(half) if way == "model" else net.float()
    if way == "input":
        net[0].to(half), net[2].to(half)
    x = torch.randn(64, 3).to(torch.float32 if way == "autocast" else half)
    lossfunc, y = extend(nn.CrossEntropyLoss()), torch.randint(2, (64,))
    plain = copy.deepcopy(net).double()
    with torch.autocast("cpu", half, enabled=way == "autocast"), batch_statistics(net, "constant"):
        loss = lossfunc(net(x), y)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    with batch_statistics(plain, "constant"):
        loss = lossfunc(plain(x.double()), y)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        for field in ("grad_batch", "diag_ggn_exact"):
            expected = getattr(q, field)
            error = (getattr(p, field).double() - expected).abs().max()
            assert error < 0.05 * expected.abs().max()


def test_refusals() -> None:
    net = images()[0]
    with pytest.raises(UsageError, match='takes "constant"'), batch_statistics(net, "exact"):
        pass
    with pytest.raises(UsageError, match="no batch normalisation"):
        batch_statistics(nn.Linear(1, 1), "constant").__enter__()
    with batch_statistics(net, "constant"), pytest.raises(UsageError, match="already"):
        batch_statistics(net, "constant").__enter__()
    with pytest.raises(UnsupportedError, match="SyncBatchNorm"):
        batch_statistics(nn.SyncBatchNorm(2), "constant").__enter__()
