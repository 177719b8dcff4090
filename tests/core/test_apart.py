"""Parameters outside of modules, tables without samples, axes that hold more than samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.contract.extension import Extension
from backpack_core.errors import SampleMixingError, ShapeError, UnsupportedError, UsageError
from backpack_core.extensions import (
    HMP,
    KFAC,
    KFRA,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagHessian,
    SumGradSquared,
    Variance,
)
from tests import oracle

V, T, D = 5, 4, 3
Forward = Callable[[Any, Tensor], Tensor]


class LanguageModel(nn.Module):
    """Tokens ``[N, T]`` to logits ``[N, T, V]``; ``embed`` and ``mix`` are what differs."""

    def __init__(self, embed: Forward, mix: Forward, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.mix = embed, mix
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(T, D)
        self.table = nn.Parameter(torch.randn(1, T, D))
        self.first = nn.Parameter(torch.randn(1, 1, D))
        self.inner, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mix(self, self.embed(self, x))
        result: Tensor = self.head(self.norm(torch.tanh(hidden)))
        return result


def _to_windows(h: Tensor) -> Tensor:
    return h.view(-1, 2, 2, D).transpose(0, 1).flatten(0, 1)


def _from_windows(h: Tensor) -> Tensor:
    return h.view(2, -1, 2, D).transpose(0, 1).flatten(1, 2)


def _plain(net: Any, x: Tensor) -> Tensor:
    return net.tokens(x)  # type: ignore[no-any-return]


def _prompted(net: Any, x: Tensor, table: Tensor) -> Tensor:
    return torch.cat([table[:, :2], net.tokens(x)[:, 2:]], 1)


EMBED: dict[str, Forward] = {
    "table": lambda net, x: net.tokens(x) + net.table,
    "looked_up": lambda net, x: net.tokens(x) + net.positions(torch.arange(T).unsqueeze(0)),
    "looked_up_flat": lambda net, x: net.tokens(x) + net.positions(torch.arange(T)),
    "class_token": lambda net, x: torch.cat(
        [net.first.expand(len(x), -1, -1), net.tokens(x)[:, 1:]], 1
    ),
    "prompt": lambda net, x: torch.cat(
        [net.positions(torch.arange(2)).unsqueeze(0).expand(len(x), -1, -1), net.tokens(x)[:, 2:]],
        1,
    ),
    "functional": lambda net, x: F.embedding(x, net.tokens.weight),
    # Tables times constants, of which no more is known
    "expanded": lambda net, x: _prompted(
        net, x, (net.positions(torch.arange(T)) * torch.ones(T, 1)).expand(len(x), -1, -1)
    ),
    "repeated": lambda net, x: _prompted(net, x, (2 * net.table[0]).repeat(len(x), 1, 1)),
}
MIX: dict[str, Forward] = {
    "module": lambda net, h: net.inner(h),
    "linear": lambda net, h: F.linear(h, net.inner.weight, net.inner.bias),
    "matmul": lambda net, h: h @ net.inner.weight.mT + net.inner.bias,
    "normalised": lambda net, h: F.linear(h, net.inner.weight / net.inner.weight.norm()),
    "elementwise": lambda net, h: h * net.inner.weight[0].exp() - net.inner.bias,
    "twice": lambda net, h: net.inner(torch.tanh(F.linear(h, net.inner.weight))),
    "merged": lambda net, h: net.inner(h.reshape(-1, D)).view(h.shape),
    "merged_twice": lambda net, h: torch.tanh(net.inner(net.inner(h.reshape(-1, D)))).view(h.shape),
    "time_first": lambda net, h: net.inner(h.transpose(0, 1)).transpose(0, 1),
    "windows": lambda net, h: net.inner(h.view(-1, 2, D)).view(h.shape),
    "windows_first": lambda net, h: _from_windows(torch.tanh(net.inner(_to_windows(h)))),
    "attention": lambda net, h: (net.table[0] @ h.mT).softmax(-1) @ net.inner(h),
    "convolution": lambda net, h: F.conv1d(h.mT, net.inner.weight.unsqueeze(-1)).mT,
    "hypernetwork": lambda net, h: F.linear(h, net.inner(net.table[0, :D])),
}
NETS = [*((e, "module") for e in EMBED), *(("plain", m) for m in MIX), ("looked_up", "merged")]


def by_token(logits: Tensor, target: Tensor) -> Tensor:
    """The ordinary line of a language model."""
    return extend(nn.CrossEntropyLoss())(logits.view(-1, V), target.view(-1))  # type: ignore[no-any-return]


def by_position(logits: Tensor, target: Tensor) -> Tensor:
    return extend(nn.CrossEntropyLoss())(logits.mT, target)  # type: ignore[no-any-return]


def functional(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), target.view(-1))


class Run:
    """One pass, and what each sample should give."""

    def __init__(self, net: tuple[str, str], samples: int, loss: Any, tied: bool = False) -> None:
        embed, mix = net
        self.model = LanguageModel(EMBED.get(embed, _plain), MIX[mix], tied)
        self.x, self.y = torch.randint(0, V, (2, samples, T)).unbind()
        self.loss = loss

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that the loss depends on."""
        used = torch.autograd.grad(
            self.model(self.x).sum(), [*self.model.parameters()], allow_unused=True
        )
        named = zip(self.model.named_parameters(), used, strict=True)
        return {name: p for (name, p), g in named if g is not None}

    def gradients(self, parameter: nn.Parameter) -> Tensor:
        """One by one."""
        rows = []
        for x, y in zip(self.x.split(1), self.y.split(1), strict=True):
            loss = F.cross_entropy(self.model(x).mT, y) / len(self.x)
            rows.append(torch.autograd.grad(loss, parameter)[0])
        return torch.stack(rows)

    def diagonals(self, parameter: nn.Parameter) -> Tensor:
        """Of the generalised Gauss-Newton matrix, one sample at a time."""
        rows = []
        for x in self.x.split(1):
            logits = self.model(x).flatten(0, 1)
            probabilities = logits.detach().softmax(1)
            total = torch.zeros(parameter.numel())
            for row, p in zip(logits, probabilities, strict=True):
                grads = [torch.autograd.grad(z, parameter, retain_graph=True)[0] for z in row]
                jacobian = torch.stack(grads).flatten(1)
                hessian = (p.diag() - p.outer(p)) / (T * len(self.x))
                total += torch.einsum("ap,ab,bp->p", jacobian, hessian, jacobian)
            rows.append(total.reshape(parameter.shape))
        return torch.stack(rows)

    def backward(self, *extensions: Extension, **options: Any) -> None:
        loss = self.loss(extend(self.model)(self.x), self.y)
        with backpack(*extensions, **options):
            loss.backward()


@pytest.mark.grid(6)
@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("samples", [1, 3, T])
@pytest.mark.parametrize("net", NETS, ids="-".join)
def test_first_order(net: tuple[str, str], samples: int, check: str) -> None:
    run = Run(net, samples, functional)
    run.backward(BatchGrad(), SumGradSquared(), BatchL2Grad(), Variance(), check=check)
    for parameter in run.parameters.values():
        expected = run.gradients(parameter)
        oracle.assert_close(parameter.grad_batch, expected)  # type: ignore[attr-defined]
        oracle.assert_close(parameter.sum_grad_squared, expected.square().sum(0))  # type: ignore[attr-defined]
        oracle.assert_close(parameter.batch_l2, expected.flatten(1).square().sum(1))  # type: ignore[attr-defined]
        oracle.assert_close(parameter.variance, expected.var(0, correction=0))  # type: ignore[attr-defined]


@pytest.mark.grid(3)
@pytest.mark.parametrize("loss", [by_token, by_position])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("net", NETS, ids="-".join)
def test_curvature(net: tuple[str, str], samples: int, loss: Any) -> None:
    run = Run(net, samples, loss, tied=net[1] == "linear")
    run.backward(BatchDiagGGNExact(), DiagGGNExact(chunk_size=7))
    for parameter in run.parameters.values():
        expected = run.diagonals(parameter)
        oracle.assert_close(parameter.diag_ggn_exact_batch, expected)  # type: ignore[attr-defined]
        oracle.assert_close(parameter.diag_ggn_exact, expected.sum(0))  # type: ignore[attr-defined]


# What is refused.


def _scrambled(net: Any, h: Tensor) -> Tensor:
    return net.inner(h.view(-1, 2, D).transpose(0, 1)).mT.reshape(h.shape)  # type: ignore[no-any-return]


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_samples_that_mix_where_they_are_kept_apart(extension: Any) -> None:
    MIX["scrambled"] = _scrambled
    try:
        run = Run(("plain", "scrambled"), 3, by_position)
    finally:
        del MIX["scrambled"]
    with pytest.raises(SampleMixingError, match=r"an axis other .* batch_axis=\.\.\."):
        run.backward(extension(), check="never")


def test_a_quantity_that_cannot_be_kept_apart() -> None:
    with pytest.raises(ShapeError, match=r"Embedding 'positions' received 1 .* 3 samples"):
        Run(("looked_up", "module"), 3, by_position).backward(KFRA())


CHOSEN_IN = [("table", "module"), ("looked_up", "linear"), ("plain", "merged")]


@pytest.mark.parametrize("net", CHOSEN_IN, ids="-".join)
@pytest.mark.parametrize("chosen", [[1], [2, 0], [1, 1]])
def test_chosen_samples(net: tuple[str, str], chosen: list[int]) -> None:
    run = Run(net, 3, by_position)
    run.backward(BatchGrad(chosen), BatchDiagGGNExact(chosen))
    for parameter in run.parameters.values():
        oracle.assert_close(parameter.grad_batch, run.gradients(parameter)[chosen])  # type: ignore[attr-defined]
        oracle.assert_close(parameter.diag_ggn_exact_batch, run.diagonals(parameter)[chosen])  # type: ignore[attr-defined]


def test_clipped_sum() -> None:
    run = Run(("class_token", "linear"), 3, functional)
    run.backward(ClippedSumGrad(0.05, normaliser=None))
    parameters = [*run.parameters.values()]
    gradients = [run.gradients(p) for p in parameters]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    weights = (0.05 / norms).clamp(max=1)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        expected = torch.einsum("n,n...->...", weights, gradient)
        oracle.assert_close(parameter.grad_clipped, expected)  # type: ignore[attr-defined]


# Terms beside the loss.


def _penalty(model: nn.Module) -> Tensor:
    total: Tensor = sum(p.square().sum() for p in model.parameters())  # type: ignore[assignment]
    return 0.01 * total


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, KFAC])
def test_a_penalty_belongs_to_no_sample(extension: Any) -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    loss = extend(nn.MSELoss())(extend(model)(x), torch.zeros(4, 2)) + _penalty(model)
    with (
        pytest.raises(UnsupportedError, match=r"parameter weight.*beside=\[term\]"),
        backpack(extension()),
    ):
        loss.backward()


def test_a_penalty_is_handed_over() -> None:
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    x, y = torch.randn(4, 3), torch.zeros(4, 2)
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(model(x), y).backward()
    expected = model.weight.grad_batch, model.weight.diag_ggn_exact
    penalty = _penalty(model)
    model.zero_grad()
    with backpack(BatchGrad(), DiagGGNExact(), beside=[penalty]):
        (lossfunc(model(x), y) + penalty).backward()
    oracle.assert_close(model.weight.grad_batch, expected[0])
    oracle.assert_close(model.weight.diag_ggn_exact, expected[1])
    oracle.assert_close(model.weight.grad, expected[0].sum(0) + 0.02 * model.weight)


def test_curvature_of_a_penalty_that_is_handed_over() -> None:
    """The Hessian has it: products by differentiating everything, diagonals not at all."""
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    x, y, v = torch.randn(4, 3), torch.zeros(4, 2), torch.randn(2, 3)
    with backpack(HMP()):
        lossfunc(model(x), y).backward()
    expected = model.weight.hmp(v) + 0.02 * v
    penalty = _penalty(model)
    with backpack(HMP(), beside=[penalty]):
        (lossfunc(model(x), y) + penalty).backward()
    oracle.assert_close(model.weight.hmp(v), expected)
    penalty = _penalty(model)
    with (
        pytest.raises(UnsupportedError, match="second derivative of a term that was handed over"),
        backpack(DiagHessian(), beside=[penalty]),
    ):
        (lossfunc(model(x), y) + penalty).backward()


def test_a_term_of_the_output_is_not_handed_over() -> None:
    model = extend(nn.Linear(3, 2))
    output = model(torch.randn(4, 3))
    term = output.abs().sum()
    with (
        pytest.raises(UnsupportedError, match="depends on the output of Linear"),
        backpack(BatchGrad(), beside=[term]),
    ):
        (output.square().sum() + term).backward()
    with pytest.raises(UsageError, match="tensors that were computed from parameters"):
        backpack(BatchGrad(), beside=[torch.ones(())])


# Derivatives of derivatives.


def _gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def _laplacian(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [
        torch.autograd.grad(s.sum(), x, create_graph=True)[0][:, i]
        for i, s in enumerate(slope.unbind(1))
    ]
    residual: Tensor = torch.stack(second).sum(0) + u.squeeze(1).sin()
    return residual.square().mean()


@pytest.mark.parametrize("samples", [1, 3, 5])
@pytest.mark.parametrize("loss", [_gradient_penalty, _laplacian])
def test_double_backward(loss: Callable[[nn.Module, Tensor], Tensor], samples: int) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    x = torch.randn(samples, 3)
    with backpack(BatchGrad()):
        loss(model, x).backward()
    for parameter in model.parameters():
        rows = [
            torch.autograd.grad(loss(model, row) / samples, parameter, materialize_grads=True)[0]
            for row in x.split(1)
        ]
        if parameter.grad is not None:
            oracle.assert_close(parameter.grad_batch, torch.stack(rows))
