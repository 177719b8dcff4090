"""Passes in which the plain gradient is not a sum: judged, refused, handed over, left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backpack_core import View, backpack, extend
from backpack_core.errors import BackpackWarning, UnsupportedError, UsageError
from backpack_core.extensions import (
    BatchGrad,
    ClippedSumGrad,
    SumGradSquared,
)
from backpack_core.testing import temporary_plugin
from backpack_layers.linear import LinearRule
from backpack_products import operations
from tests import oracle
from tests.core.side_by_side import PASSES, Step, conv_net, token_net


def test_a_rule_that_misses_a_use_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's gradient judges: where the sum is another one, it stays autograd's."""
    step = Step(token_net(), (9, 2))
    original = operations.batch_sum
    monkeypatch.setattr(operations, "batch_sum", lambda product: 1.001 * original(product))
    for _ in range(PASSES):
        step.plain.zero_grad()
        step.extended.zero_grad()
        step.run(BatchGrad())
        step.compare()
    assert not any(step.left)


def test_structures_are_judged_one_by_one() -> None:
    step = Step(token_net(), (9, 2))
    step.check(BatchGrad())
    step.extended.eval()
    step.plain.eval()
    step.check(BatchGrad())
    step.check(SumGradSquared())
    assert [bool(left) for left in step.left] == 3 * [False, False, True, False, True]


def test_half_precision_is_autograds() -> None:
    step = Step(token_net().bfloat16(), (9, 2))
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
    step = Step(model, (9, 2))
    with pytest.warns(BackpackWarning, match="checkpoint"):
        step.check(BatchGrad())
    assert not any(step.left)


def test_inputs_that_the_user_names() -> None:
    step = Step(token_net(), (9, 2))
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
    step = Step(token_net(), (9, 2))
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
    step = Step(token_net(), (9, 2))
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
    step = Step(token_net(), (9, 2))
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
    step = Step(token_net(), (9, 2))
    step.run(mode="autograd")
    before = [p.grad.clone() for p in step.extended.parameters() if p.grad is not None]
    step.run(ClippedSumGrad(1.0), mode="none")
    for parameter, gradient in zip(step.extended.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Half(LinearRule):
    """Half of the products."""

    module_types = (Own,)

    def affine_output(self, view: View, mat: Tensor) -> Tensor:
        return super().affine_output(view, mat) / 2


@pytest.mark.parametrize("mode", ["none", "skipped"])
def test_a_wrong_rule_is_found_all_the_same(mode: Any) -> None:
    """Autograd computes what is compared, and nobody sees it."""
    model, lossfunc, before = extend(Own(3, 2)), extend(nn.CrossEntropyLoss()), torch.ones(2, 3)
    model.weight.grad = before
    with temporary_plugin(Half):
        loss = lossfunc(model(torch.randn(4, 3)), torch.randint(0, 2, (4,)))
        refused = pytest.raises(UnsupportedError, match="do not add up")
        with backpack(BatchGrad(), gradient=mode), refused:
            loss.backward()
    assert model.weight.grad is before
    assert torch.equal(before, torch.ones(2, 3))
    assert model.bias.grad is None


def test_hooks_on_parameters_are_not_called() -> None:
    model, lossfunc = extend(nn.Sequential(nn.Linear(3, 2))), extend(nn.CrossEntropyLoss())
    called = []
    model[0].weight.register_hook(lambda gradient: called.append("hook"))
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: called.append("after"))
    with backpack(BatchGrad(), gradient="none"):
        lossfunc(model(torch.randn(4, 3)), torch.randint(0, 2, (4,))).backward()
    assert not called


def test_only_three_words() -> None:
    with pytest.raises(UsageError, match="gradient is one of"):
        backpack(BatchGrad(), gradient="free")  # type: ignore[arg-type]
