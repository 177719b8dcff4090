"""Derivatives of a net in its input as a part of the loss, where lengths agree by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.testing import oracle as kit
from tests.cases import Net
from tests.core import first_order
from tests.oracle import assert_close

Loss = Callable[[nn.Module, Tensor], Tensor]


def _with_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output, gradient


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    output, gradient = _with_gradient(model, x)
    return output.square().sum() + gradient.square().sum()


def lipschitz(model: nn.Module, x: Tensor) -> Tensor:
    output, gradient = _with_gradient(model, x)
    return (gradient.flatten(1).norm(dim=1) - 1).square().sum() - output.sin().sum()


def gradient_alone(model: nn.Module, x: Tensor) -> Tensor:
    return _with_gradient(model, x)[1].square().sum()


def third_order(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().sum()


LOSSES: list[Loss] = [penalty, lipschitz, gradient_alone, third_order]


def _randomized(model: nn.Module) -> nn.Module:
    """With parameters and statistics of which none is zero or one."""
    for part in model.modules():
        if isinstance(getattr(part, "running_mean", None), Tensor):
            nn.init.normal_(part.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(part.running_var, 0.5, 2)  # type: ignore[arg-type]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model


def check(model: nn.Module, x: Tensor, loss: Loss, **options: Any) -> None:
    """Quantities of first order against a loop over samples."""
    alone = [loss(model, x[n : n + 1]) for n in range(len(x))]
    extend(model, **options)
    first_order.check(model, lambda: loss(model, x), alone)


# Normalisation ----------------------------------------------------------------------------------


def _image(norm: nn.Module, size: int) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[size - 1]
    return nn.Sequential(kind(2, 4, 2), norm, nn.Tanh(), nn.Flatten(), nn.Linear(4 * 2**size, 1))


def _functional(net: Any, x: Tensor) -> Tensor:
    n = net.norm
    h = F.batch_norm(net.a(x), n.running_mean, n.running_var, n.weight, n.bias)
    return net.b(torch.tanh(h))  # type: ignore[no-any-return]


def _fused(net: Any, x: Tensor) -> Tensor:
    """As compilers write it."""
    n, given = net.norm, (net.norm.weight, net.norm.bias, net.norm.running_mean)
    h = torch.ops.aten._native_batch_norm_legit_no_training(
        net.a(x), *given, n.running_var, 0.1, 1e-5
    )[0]
    return net.b(torch.tanh(h))  # type: ignore[no-any-return]


def _flat(forward: Any = None, **options: Any) -> nn.Module:
    parts = {"a": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4, **options), "b": nn.Linear(4, 1)}
    usual = lambda net, x: net.b(torch.tanh(net.norm(net.a(x))))  # noqa: E731
    return Net(forward or usual, **parts)


STATISTICS: dict[str, Any] = {"affine": True, "track_running_stats": True}
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (_flat, (3,)),
    "1d without weights": (lambda: _flat(affine=False), (3,)),
    "1d function": (lambda: _flat(_functional), (3,)),
    "1d fused": (lambda: _flat(_fused), (3,)),
    "1d first": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)), (3,)),
    "1d of sequences": (lambda: _image(nn.BatchNorm1d(4), 1), (2, 3)),
    "2d": (lambda: _image(nn.BatchNorm2d(4), 2), (2, 3, 3)),
    "2d without weights": (lambda: _image(nn.BatchNorm2d(4, affine=False), 2), (2, 3, 3)),
    "3d": (lambda: _image(nn.BatchNorm3d(4), 3), (2, 3, 3, 3)),
    "of processes": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4), nn.Tanh(), nn.Linear(4, 1)),
        (3,),
    ),
    "instances": (lambda: _image(nn.InstanceNorm2d(4, **STATISTICS), 2), (2, 3, 3)),
    "groups": (lambda: _image(nn.GroupNorm(2, 4), 2), (2, 3, 3)),
}


@pytest.mark.grid(8)
@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", NORMS)
def test_normalisation_by_known_statistics(name: str, loss: Loss, samples: int) -> None:
    torch.manual_seed(0)
    make, shape = NORMS[name]
    check(_randomized(make()).eval(), torch.randn(samples, *shape), loss)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["1d", "1d function", "2d without weights", "3d"])
def test_statistics_of_the_batch_mix(name: str, loss: Loss) -> None:
    make, shape = NORMS[name]
    model = extend(make())
    value = loss(model, torch.randn(3, *shape))
    if name == "1d function":  # which is in eval mode whatever the model is
        value = value + F.batch_norm(model(torch.randn(3, *shape)), None, None, training=True).sum()
    with pytest.raises(SampleMixingError, match="eval"), backpack(BatchGrad()):
        value.backward()


@pytest.mark.parametrize("samples", [1, 3])
def test_a_derivative_within_a_model_has_curvature(samples: int) -> None:
    torch.manual_seed(0)
    model = _randomized(Net(_derived, inner=_flat(), head=nn.Linear(3, 2)).eval())
    lossfunc, x = nn.CrossEntropyLoss(reduction="sum"), torch.randn(samples, 3)
    y, parameters = torch.randint(0, 2, (samples,)), [*model.parameters()]
    output = model(x)
    p, jacobians = output.detach().softmax(1), kit.jacobians(output, dict(enumerate(parameters)))
    hessian = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    value = extend(lossfunc)(extend(model)(x), y)
    with backpack(DiagGGNExact()):
        value.backward()
    for k, parameter in enumerate(parameters):
        expected = torch.einsum("nc...,ncd,nd...->...", jacobians[k], hessian, jacobians[k])
        if parameter.grad is None:
            assert not expected.any()
            continue
        assert_close(1 + parameter.diag_ggn_exact, 1 + expected)  # type: ignore[attr-defined]


def _derived(net: Any, x: Tensor) -> Tensor:
    return net.head(x + _with_gradient(net.inner, x)[1])  # type: ignore[no-any-return]


# Attention --------------------------------------------------------------------------------------


def _attending(width: int, heads: int, is_first: bool, **options: Any) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = x if is_first else x.transpose(0, 1)
        h = net.a(x, x, x, **options)[0]
        h = h if is_first else h.transpose(0, 1)
        return net.b(torch.tanh(h)).sum((1, 2))  # type: ignore[no-any-return]

    attention = nn.MultiheadAttention(width, heads, batch_first=is_first)
    return Net(forward, a=attention, b=nn.Linear(width, 1))


def _encoding(width: int, heads: int, is_first: bool, **options: Any) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x if is_first else x.transpose(0, 1))
        h = h if is_first else h.transpose(0, 1)
        return net.b(torch.tanh(h)).sum((1, 2))  # type: ignore[no-any-return]

    layer = nn.TransformerEncoderLayer(
        width, heads, 3, 0.0, F.gelu, batch_first=is_first, bias=False, **options
    )
    return Net(forward, a=layer, b=nn.Linear(width, 1))


ATTENTIONS = {
    "attention": _attending,
    "averaged": lambda *args: _attending(*args, need_weights=True),
    "alone": lambda *args: _attending(*args, need_weights=False),
    "layer": _encoding,
    "norm first": lambda *args: _encoding(*args, norm_first=True),
}
# Samples, positions, width and heads: the packed axis of queries, keys and values is of three.
LENGTHS = [
    (3, 2, 4, 2),
    (3, 4, 4, 4),
    (3, 3, 6, 3),
    (3, 5, 3, 1),
    (2, 2, 4, 2),
    (4, 4, 4, 4),
    (5, 5, 4, 2),
    (1, 1, 4, 2),
    (1, 3, 4, 2),
    (3, 1, 3, 1),
    (6, 3, 4, 2),
]


@pytest.mark.grid(4)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str, is_first: bool, is_declared: bool, lengths: Any) -> None:
    torch.manual_seed(0)
    samples, positions, width, heads = lengths
    model = _randomized(ATTENTIONS[name](width, heads, is_first))
    loss = LOSSES[sum(lengths) % 3]
    options = {"batch_axis": 0} if is_declared else {}
    with sdpa_kernel(SDPBackend.MATH):
        check(model, torch.randn(samples, positions, width), loss, **options)


@pytest.mark.parametrize("samples", [2, 3, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_steps_as_many_as_samples(samples: int, axis: int) -> None:
    """A model takes one after the other, with the time in front, or not."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.a(x)).transpose(0, 1 - axis)
        steps = [h.select(axis, t) * h.narrow(axis, 1, 1).squeeze(axis) for t in range(samples)]
        return net.b(torch.sin(torch.stack(steps).sum(0)))  # type: ignore[no-any-return]

    model = _randomized(Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 1)))
    check(model, torch.randn(samples, samples, 3), penalty)
