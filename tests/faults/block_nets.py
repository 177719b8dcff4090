"""Nets of all kinds for products with blocks: derivatives of the loss, whatever lies in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import Net, mlp


def _linear(**sizes: tuple[int, int]) -> dict[str, Any]:
    return {name: nn.Linear(*size) for name, size in sizes.items()}


# A bias before a batch normalisation has no effect.


def normalised() -> nn.Sequential:
    first = nn.Linear(3, 4, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def normalised_images() -> nn.Sequential:
    first, second = nn.Conv2d(1, 2, 2, bias=False), nn.Conv2d(2, 2, 2, bias=False)
    layers = [first, nn.BatchNorm2d(2), nn.Sigmoid(), second, nn.BatchNorm2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))


def _normalised_last() -> nn.Sequential:
    last = nn.Linear(3, 3, bias=False)
    return nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), last, nn.BatchNorm1d(3))


def _normalised_residual() -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.a(x)
        return net.c(F.gelu(net.norm(hidden)) + hidden)  # type: ignore[no-any-return]

    return Net(forward, **_linear(a=(3, 4), c=(4, 3)), norm=nn.BatchNorm1d(4))


def _centred() -> Net:
    """Samples are mixed by hand."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.a(x)
        return net.c(torch.tanh(hidden - hidden.mean(0)))  # type: ignore[no-any-return]

    return Net(forward, a=nn.Linear(3, 4, bias=False), c=nn.Linear(4, 3))


def _gelu() -> Net:
    return Net(lambda net, x: net.c(F.gelu(net.a(x))), **_linear(a=(3, 4), c=(4, 3)))


def _product() -> Net:
    parts = _linear(a=(3, 4), b=(3, 4), c=(4, 3))
    return Net(lambda net, x: net.c(net.a(x) * net.b(x)), **parts)


def _gated() -> Net:
    parts = _linear(a=(3, 4), b=(3, 4), c=(4, 3))
    return Net(lambda net, x: net.c(F.silu(net.a(x)) * net.b(x).sigmoid()), **parts)


def _branches() -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.tanh(net.a(x))
        return net.c(hidden + net.sigmoid(net.b(hidden)))  # type: ignore[no-any-return]

    parts = _linear(a=(3, 4), b=(4, 4), c=(4, 3))
    return Net(forward, **parts, tanh=nn.Tanh(), sigmoid=nn.Sigmoid())


def _twice() -> Net:
    parts = _linear(a=(3, 3), c=(3, 3))
    return Net(lambda net, x: net.c(net.tanh(net.a(net.tanh(net.a(x))))), **parts, tanh=nn.Tanh())


def _tied() -> Net:
    net = Net(
        lambda net, x: net.b(net.tanh(net.a(x))), **_linear(a=(3, 3), b=(3, 3)), tanh=nn.Tanh()
    )
    net.b.weight = net.a.weight
    return net


def _own() -> nn.Sequential:
    own = Net(lambda net, x: torch.sin(x * net.w), w=nn.Parameter(torch.randn(4)))
    return nn.Sequential(nn.Linear(3, 4), own, nn.Linear(4, 3))


def _own_twice_nonlinear() -> nn.Sequential:
    own = Net(lambda net, x: x * net.w.exp() + net.w**2, w=nn.Parameter(torch.randn(4)))
    return nn.Sequential(nn.Linear(3, 4), own, nn.Tanh(), nn.Linear(4, 3))


def _embedded() -> Net:
    parts = {"a": nn.Embedding(3, 4), "c": nn.Linear(4, 3)}
    return Net(lambda net, x: net.c(F.gelu(net.a(x.argmax(1)))), **parts)


def _dropped() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))


def _recurrent() -> Net:
    parts = {"a": nn.RNN(1, 2, batch_first=True), "c": nn.Linear(6, 3)}
    return Net(lambda net, x: net.c(net.a(x[:, :, None])[0].flatten(1)), **parts)


def _gated_recurrent() -> Net:
    parts = {"a": nn.LSTM(1, 2, batch_first=True), "c": nn.Linear(2, 3)}
    return Net(lambda net, x: net.c(net.a(x[:, :, None])[0][:, -1]), **parts)


def _attending() -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        tokens = net.a(x[:, :, None])
        weights = (tokens @ tokens.mT).softmax(-1)
        return net.c((weights @ net.b(tokens)).flatten(1))  # type: ignore[no-any-return]

    return Net(forward, **_linear(a=(1, 2), b=(2, 2), c=(6, 3)))


def _normalised_tokens() -> Net:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(F.layer_norm(net.a(x), (4,)).relu())  # type: ignore[no-any-return]

    return Net(forward, **_linear(a=(3, 4), c=(4, 3)))


def _plain() -> nn.Sequential:
    return nn.Sequential(*mlp(), nn.Softmax(1))


def _frozen() -> nn.Sequential:
    net = normalised()
    net[1].weight.requires_grad_(False)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    function.__name__.strip("_"): function
    for function in (
        normalised,
        _normalised_last,
        _normalised_residual,
        _frozen,
        _centred,
        _gelu,
        _product,
        _gated,
        _branches,
        _twice,
        _tied,
        _own,
        _own_twice_nonlinear,
        _embedded,
        _dropped,
        _recurrent,
        _gated_recurrent,
        _attending,
        _normalised_tokens,
        _plain,
    )
}
