"""Blocks whose extensions have no parameter to read: it is said, unless nothing was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import NotExtendedError, UncoveredParameterWarning, UsageError
from backpack_core.extensions import HMP, KFRA, BatchGrad, ClippedSumGrad, DiagGGNExact
from tests.cases import Net

EXTENSIONS = (BatchGrad, lambda: ClippedSumGrad(1.0), DiagGGNExact, KFRA, HMP)


def _frozen() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return extend(net.requires_grad_(False))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = extend(nn.CrossEntropyLoss())(model(x), torch.tensor([0, 1, 1]))
    return loss


@pytest.mark.parametrize("make", EXTENSIONS)
@pytest.mark.parametrize("fail_mode", ["autodiff", "silent"])
def test_all_parameters_are_frozen(make: Any, fail_mode: Any) -> None:
    extension, x = make(), torch.randn(3, 3, requires_grad=True)
    extension.fail_mode = fail_mode
    message = r"computed nothing: no parameter .* requires a gradient"
    with pytest.raises(UsageError, match=message), backpack(extension):
        _loss(_frozen(), x).backward()
    assert x.grad is not None


def test_those_that_are_frozen_after_the_forward_pass() -> None:
    """Autograd brings them nothing, either."""
    model = extend(nn.Linear(3, 2))
    loss = _loss(model, torch.randn(3, 3))
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="computed nothing"), backpack(BatchGrad()):
        loss.backward()
    assert model.weight.grad is None


@pytest.mark.parametrize("options", [{}, {"debug": True}, {"extension_hook": lambda module: None}])
def test_where_nothing_is_asked_for(options: dict[str, Any]) -> None:
    x = torch.randn(3, 3, requires_grad=True)
    with backpack(**options):
        _loss(_frozen(), x).backward()
    assert x.grad is not None


def test_a_prompt_that_belongs_to_no_model() -> None:
    """As everywhere, a parameter of nobody gets a warning."""
    prompt = nn.Parameter(torch.randn(3))
    with backpack(BatchGrad()), pytest.warns(UncoveredParameterWarning, match="gets no quantity"):
        _loss(_frozen(), torch.randn(3, 3) + prompt).backward()


def test_a_prompt_of_an_extended_model() -> None:
    net = Net(
        lambda net, x: net.body(x + net.prompt), body=_frozen(), prompt=nn.Parameter(torch.randn(3))
    )
    with backpack(BatchGrad()):
        _loss(extend(net), torch.randn(3, 3)).backward()
    assert net.prompt.grad_batch.shape == (3, 3)  # type: ignore[union-attr]


def test_one_of_several_passes_is_enough() -> None:
    x, trained = torch.randn(3, 3, requires_grad=True), extend(nn.Linear(3, 2))
    with backpack(BatchGrad()):
        _loss(_frozen(), x).backward()
        _loss(trained, x).backward()
    assert hasattr(trained.weight, "grad_batch")


def test_the_users_own_error_comes_first() -> None:
    def fail(module: nn.Module) -> None:
        raise KeyError

    loss = _loss(_frozen(), torch.randn(3, 3, requires_grad=True))
    with pytest.raises(KeyError), backpack(BatchGrad(), extension_hook=fail):
        loss.backward()


@pytest.mark.parametrize("make", EXTENSIONS)
def test_backward_of_a_leaf_meets_no_module(make: Any) -> None:
    leaf = torch.ones((), requires_grad=True)
    with pytest.raises(NotExtendedError, match="computed nothing"), backpack(make()):
        leaf.backward()
