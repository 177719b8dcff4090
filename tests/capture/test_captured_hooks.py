"""Hooks on gradients hear what they always hear; a hook that only computes is recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import CapturedStep, capture
from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_core.extensions import BatchGrad, BatchL2Grad
from tests.capture.nets import mlp

Batch = tuple[Tensor, Tensor]


def batch() -> Batch:
    return torch.rand(4, 5), torch.randint(3, (4,))


class Pair:
    """Equal nets with equal hooks, one of them captured."""

    def __init__(self, add: Callable[[nn.Module, list[Any]], None], **options: Any) -> None:
        torch.manual_seed(0)
        first = mlp()
        self.models = [extend(first), extend(copy.deepcopy(first))]
        self.heard: list[list[Any]] = [[], []]
        for model, heard in zip(self.models, self.heard, strict=True):
            add(model, heard)
        self.losses = [extend(nn.CrossEntropyLoss()) for _ in range(2)]
        model, lossfunc = self.models[0], self.losses[0]
        self.step: CapturedStep = capture(
            lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad(), **options
        )
        options.pop("hook_only_computes", None)
        self.options = options

    def run(self, *given: Tensor) -> None:
        self.step(*given)
        with backpack(BatchGrad(), **self.options):
            self.losses[1](self.models[1](given[0]), given[1]).backward()
        assert len(self.heard[0]) == len(self.heard[1])
        for ours, right in zip(*self.heard, strict=True):
            torch.testing.assert_close(ours, right)
        for one, other in zip(*(m.parameters() for m in self.models), strict=True):
            torch.testing.assert_close(one, other)
            torch.testing.assert_close(one.grad, other.grad)
            ours, right = one.__dict__.get("grad_batch"), other.__dict__.get("grad_batch")
            torch.testing.assert_close(ours, right)

    @property
    def is_replayed(self) -> bool:
        return "compared" in self.step.report()


def doubling(model: nn.Module, heard: list[Any]) -> None:
    """It changes the gradient."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: heard.append(grad.clone()) or 2 * grad)


def noting(model: nn.Module, heard: list[Any]) -> None:
    """It sees the gradient that there is afterwards."""
    for place, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda p, place=place: heard.append((place, p.grad.clone()))
        )


def both_on_some(model: nn.Module, heard: list[Any]) -> None:
    weight = model[2].weight
    weight.register_hook(lambda grad: heard.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone()))


def optimising(model: nn.Module, heard: list[Any]) -> None:
    """An optimiser in the backward pass: it updates, and lets go of the gradient."""
    for parameter in model.parameters():
        optimiser = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def update(p: Tensor, optimiser: torch.optim.Optimizer = optimiser) -> None:
            optimiser.step()
            optimiser.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)


@pytest.mark.parametrize("number", [0, 6])
def test_a_parameter_that_is_frozen_keeps_its_hooks(number: int) -> None:
    pair = Pair(doubling)
    for step in range(12):
        for model in pair.models:
            first, *_ = model.parameters()
            first.requires_grad_(step < number)
            model.zero_grad()
        pair.run(*batch())
    assert pair.is_replayed


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("add", [doubling, noting, both_on_some, optimising])
def test_hooks_on_gradients(add: Any, keeps: bool) -> None:
    pair = Pair(add)
    for _ in range(14):
        pair.run(*batch())
        if not keeps:
            for model in pair.models:
                model.zero_grad()
    assert pair.is_replayed, pair.step.report()
    assert pair.heard[0] or add is optimising


def test_a_hook_that_is_removed_is_not_called_again() -> None:
    pair = Pair(noting)
    for _ in range(8):
        pair.run(*batch())
    for model in pair.models:
        for parameter in model.parameters():
            parameter._post_accumulate_grad_hooks.clear()
    count = len(pair.heard[0])
    for _ in range(6):
        pair.run(*batch())
    assert len(pair.heard[0]) == count


def test_hooks_of_a_gradient_that_is_not_of_autograd_are_refused() -> None:
    pair = Pair(noting, gradient="none")
    with pytest.warns(UserWarning, match="a hook listens to the gradient of 0.weight, and"):
        pair.step(*batch())


def norms(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.norms = parameter.grad_batch.flatten(1).norm(dim=1)
        del parameter.grad_batch


def test_an_extension_hook_is_recorded() -> None:
    pair = Pair(lambda model, heard: None, extension_hook=norms, hook_only_computes=True)
    for _ in range(14):
        pair.run(*batch())
        for one, other in zip(*(m.parameters() for m in pair.models), strict=True):
            torch.testing.assert_close(one.norms, other.norms)
            assert not hasattr(one, "grad_batch")
    assert pair.is_replayed, pair.step.report()
    assert "linalg.vector_norm" in pair.step.code


def test_an_extension_hook_that_keeps_tensors_is_refused() -> None:
    kept = list[Tensor]()
    pair = Pair(
        lambda model, heard: None,
        extension_hook=lambda m: kept.extend(p.grad_batch for p in m.parameters(recurse=False)),
        hook_only_computes=True,
    )
    for _ in range(3):
        pair.run(*batch())
    with pytest.warns(UserWarning, match="elsewhere than in|changes attributes"):
        pair.run(*batch())
    pair.run(*batch())
    assert len(kept) == 2 * 5 * 6


def test_an_extension_hook_needs_a_word() -> None:
    model = extend(mlp())
    with pytest.raises(UsageError, match="hook_only_computes=True"):
        capture(lambda x: x, model, BatchL2Grad(), extension_hook=norms)
