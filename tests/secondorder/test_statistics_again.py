"""Hessians of losses of derivatives of normalisations, which torch computes wrongly."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import HMP, DiagHMP
from tests import oracle
from tests.cases import Net


def normalised(x: Tensor, axes: list[int]) -> Tensor:
    """By definition, with the ``ε`` of the modules below."""
    mean, variance = x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)
    return (x - mean) / (variance + 0.1).sqrt()


class Derived(nn.Module):
    """The derivative of a net with a normalisation in the net's input."""

    def __init__(self, norm: nn.Module, definition: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), norm, nn.Linear(4, 1)
        self.definition, self.is_defined = definition, False

    def forward(self, x: Tensor) -> Tensor:
        """Of the sum over samples."""
        x = x.detach().requires_grad_()
        hidden = self.first(x)
        hidden = torch.stack([hidden, 2 * hidden.sin(), hidden.cos()], 2)
        found = self.definition(self.norm, hidden) if self.is_defined else self.norm(hidden)
        total = self.last(found.tanh().sum(2)).sin().sum()
        return torch.autograd.grad(total, x, create_graph=True)[0]


def _layer_norm(norm: nn.Module, x: Tensor) -> Tensor:
    found = normalised(x, [2] if norm.normalized_shape == (3,) else [1, 2])
    found = found if norm.weight is None else found * norm.weight
    return found if norm.bias is None else found + norm.bias  # type: ignore[no-any-return]


def _of_channels(norm: nn.Module, x: Tensor) -> Tensor:
    axes = [2] if isinstance(norm, nn.InstanceNorm1d) else [0, 2]
    found = normalised(x, axes)
    return found if norm.weight is None else found * norm.weight[:, None] + norm.bias[:, None]


def _of_known(norm: nn.Module, x: Tensor) -> Tensor:
    found = (x - norm.running_mean[:, None]) / (norm.running_var[:, None] + 0.1).sqrt()
    return found * norm.weight[:, None] + norm.bias[:, None]  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], Derived]] = {
    "layer": lambda: Derived(nn.LayerNorm(3, 0.1), _layer_norm),
    "layer of two axes": lambda: Derived(nn.LayerNorm((4, 3), 0.1), _layer_norm),
    "layer without a bias": lambda: Derived(nn.LayerNorm(3, 0.1, bias=False), _layer_norm),
    "layer without parameters": lambda: Derived(nn.LayerNorm(3, 0.1, False), _layer_norm),
    "function": lambda: Derived(
        Net(
            lambda net, x: F.layer_norm(x, (3,), net.gain, eps=0.1),
            gain=nn.Parameter(torch.rand(3)),
        ),
        lambda net, x: normalised(x, [2]) * net.gain,
    ),
    "instance": lambda: Derived(nn.InstanceNorm1d(4, 0.1, affine=True), _of_channels),
    "instance without parameters": lambda: Derived(nn.InstanceNorm1d(4, 0.1), _of_channels),
    "batch": lambda: Derived(nn.BatchNorm1d(4, 0.1, momentum=0.0), _of_channels),
    "known statistics": lambda: Derived(nn.BatchNorm1d(4, 0.1).eval(), _of_known),
}


def _hessian(model: Derived, x: Tensor, y: Tensor) -> tuple[list[nn.Parameter], Tensor]:
    """Of all parameters together, by definition."""
    model.is_defined = True
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]

    def loss(flat: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(flat.split(sizes), parameters, strict=True)]
        given = dict(zip(dict(model.named_parameters()), parts, strict=True))
        return (torch.func.functional_call(model, given, (x,)) - y).square().sum()

    start = torch.cat([p.detach().flatten() for p in parameters])
    return parameters, torch.autograd.functional.hessian(loss, start)


@pytest.mark.parametrize("name", MODELS)
def test_hessian_of_a_derivative(name: str) -> None:
    model, x, y = MODELS[name](), torch.randn(3, 3), torch.randn(3, 3)
    for parameter in model.norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    parameters, hessian = _hessian(copy.deepcopy(model), x, y)
    places = torch.arange(len(hessian)).split([p.numel() for p in parameters])
    loss = extend(nn.MSELoss(reduction="sum"))(extend(model)(x), y)
    with backpack(HMP(), DiagHMP()):
        loss.backward()
    for parameter, place in zip(model.parameters(), places, strict=True):
        if parameter.grad is None:  # an offset that no derivative depends on
            continue
        vector = torch.randn(1, *parameter.shape)
        block = hessian[place][:, place]
        oracle.assert_close(parameter.hmp(vector)[0].flatten(), block @ vector.flatten(), 1e-9)
        oracle.assert_close(parameter.diag_hmp.flatten(), block.diagonal(), 1e-9)
