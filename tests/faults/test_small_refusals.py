"""What was accepted without meaning, refused without a reason, or answered wrongly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backpack as backpack_before
from backpack import extensions as before
from backpack.core.derivatives import batchnorm_nd
from backpack.extensions import HBP
from backpack.extensions.curvature import Curvature
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack.extensions.secondorder.hbp import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack_core import backpack, extend
from backpack_core.errors import ShapeError, UnsupportedError, UsageError
from backpack_core.extensions import BatchGrad, ClippedSumGrad, DiagGGNExact, GGNGram
from backpack_layers.modules import Permute
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.secondorder.problems import hessians


class Turned(nn.Module):
    """Turns the batch around, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = self.last(self.first(x).permute(1, 0).transpose(0, 1))
        return turned


SUM, AVERAGE = LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE
BOTEV_MARTENS = ExpectationApproximation.BOTEV_MARTENS


class Zeros(FirstOrderModuleExtension):
    """Takes the place of a rule."""

    def __init__(self) -> None:
        super().__init__(["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
        return torch.zeros(len(g_out[0]), *module.weight.shape)


class Unknown(nn.Linear):
    """A layer of one's own, without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


@pytest.mark.parametrize("extension", [before.BatchGrad, before.DiagGGNExact])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d, nn.LSTM])
def test_a_rule_is_not_replaced_without_a_word(kind: type[nn.Module], extension: Any) -> None:
    with pytest.raises(UsageError, match="overwrite=True"):
        extension().set_module_extension(kind, Zeros())


def test_a_rule_is_replaced_on_request() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3, bias=False)), (3,))
    extension = before.BatchGrad()
    extension.set_module_extension(nn.Linear, Zeros(), overwrite=True)
    problem.run(extension)
    assert not problem.parameters[0].grad_batch.any()  # type: ignore[attr-defined]


def test_where_no_rule_is_there_nothing_is_replaced() -> None:
    problem = classification(nn.Sequential(Unknown(3, 3, bias=False)), (3,))
    extension = before.BatchGrad()
    extension.set_module_extension(Unknown, Zeros())
    problem.run(extension)
    assert not problem.parameters[0].grad_batch.any()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dims", "transposed"),
    [((1, 0, 2), False), ((-1, 0), False), ((2, 1, 0), False), ((0, 1), True), ((2, 0), True)],
    ids=str,
)
def test_a_permutation_keeps_the_samples_in_front(dims: tuple[int, ...], transposed: bool) -> None:
    with pytest.raises(UsageError, match="axis 0"):
        Permute(*dims, init_transpose=transposed)


@pytest.mark.parametrize(
    ("dims", "transposed"),
    [((0, 2, 1), False), ((-3, -1, 1), False), ((1, 2), True), ((-1, -2), True), ((1, 1), True)],
    ids=str,
)
def test_other_permutations(dims: tuple[int, ...], transposed: bool) -> None:
    module = Permute(*dims, init_transpose=transposed)
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Unflatten(1, (1, 3)), module, nn.Flatten(), nn.Linear(3, 3)
    )
    classification(model, (3,)).check()


def test_a_permutation_of_the_batch_stays_a_function_when_converted() -> None:
    """It is no helper module, and is crossed exactly."""

    problem = classification(backpack_before.extend(Turned(), use_converter=True), (3,))
    problem.check()


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_the_hessian_of_a_batch_normalisation(kind: type[nn.BatchNorm1d]) -> None:
    derivatives = batchnorm_nd.BatchNormNdDerivatives()
    assert not derivatives.hessian_is_zero(kind(3))
    assert derivatives.hessian_is_zero(kind(3).eval())
    assert not derivatives.hessian_is_zero(kind(3, track_running_stats=False).eval())


def _single(reduction: str, *layers: nn.Module) -> Problem:
    """A batch of one sample."""
    return classification(nn.Sequential(*layers), (3,), 1, reduction=reduction)


def _deep() -> list[nn.Module]:
    return [nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("layers", [_deep, lambda: [*_deep(), nn.Softmax(1), nn.Linear(3, 3)]],
                         ids=["elementwise", "softmax"])  # fmt: skip
def test_averaged_hessian_of_one_sample_is_its_block(layers: Any, reduction: str) -> None:
    problem = _single(reduction, *layers())
    blocks = problem.expected(hessians)
    problem.run(HBP(Curvature.HESSIAN, SUM, AVERAGE, BOTEV_MARTENS, savefield="mine"))
    for factors, block in zip(problem.fields("mine"), blocks, strict=True):
        dense = factors[0]
        for factor in factors[1:]:
            dense = torch.kron(dense, factor)
        oracle.assert_close(dense, block[0])


def test_averaged_hessian_of_several_samples() -> None:
    """``Σ_n`` of the loss's Hessian and of the residuals, averaged Jacobians (Botev, eq. 21)."""
    problem = classification(nn.Sequential(*_deep()[:3]), (3,), 5)
    first, _, last = problem.model  # type: ignore[misc]
    x = problem.inputs[0]
    hidden = first(x).detach().requires_grad_()
    active = torch.sigmoid(hidden)
    output = last(active).detach()
    loss = problem.lossfunc(last(active), problem.target)
    (slope,) = torch.autograd.grad(loss, active, retain_graph=True)
    blocks = oracle.loss_hessians(lambda out: problem.lossfunc(out, problem.target), output)
    at_output = blocks.sum(0)
    at_active = last.weight.T @ at_output @ last.weight
    derivative = (active * (1 - active)).detach()
    curvature = (derivative * (1 - 2 * active) * slope).detach()
    at_hidden = torch.einsum("ni,ij,nj->ij", derivative, at_active, derivative) / len(x)
    at_hidden = at_hidden + torch.diag(curvature.sum(0))
    problem.run(HBP(Curvature.HESSIAN, SUM, AVERAGE, BOTEV_MARTENS, savefield="mine"))
    weight, bias, *_ = problem.fields("mine")
    oracle.assert_close(bias[0], at_hidden)
    oracle.assert_close(weight[0], at_hidden)
    oracle.assert_close(weight[1], x.T @ x / len(x))


@pytest.mark.parametrize(
    ("curvature", "modify"),
    [(Curvature.PCH_CLIP, lambda d: d.clamp(min=0)), (Curvature.PCH_ABS, torch.abs)],
    ids=["clip", "abs"],
)
def test_averaged_positive_curvature(curvature: str, modify: Any) -> None:
    """Of one sample, so that nothing is averaged."""
    problem = _single("mean", *_deep()[:3])
    first, _, last = problem.model  # type: ignore[misc]
    hidden = first(problem.inputs[0]).detach()
    active = torch.sigmoid(hidden).requires_grad_()
    output = last(active)
    (slope,) = torch.autograd.grad(problem.lossfunc(output, problem.target), active)
    block = oracle.loss_hessians(lambda out: problem.lossfunc(out, problem.target), output)[0]
    derivative = (active * (1 - active)).detach()[0]
    at_hidden = derivative[:, None] * (last.weight.T @ block @ last.weight) * derivative
    residual = derivative * (1 - 2 * active.detach()[0]) * slope[0]
    problem.run(HBP(curvature, SUM, AVERAGE, BOTEV_MARTENS, savefield="mine"))
    bias = problem.fields("mine")[1]
    oracle.assert_close(bias[0], (at_hidden + torch.diag(modify(residual))).detach())


@pytest.mark.parametrize(
    ("curvature", "strategies"),
    [
        (Curvature.HESSIAN, (LossHessianStrategy.EXACT, BackpropStrategy.SQRT, BOTEV_MARTENS)),
        (Curvature.HESSIAN, (LossHessianStrategy.SAMPLING, BackpropStrategy.SQRT, BOTEV_MARTENS)),
        (Curvature.GGN, (SUM, BackpropStrategy.SQRT, BOTEV_MARTENS)),
        (Curvature.GGN, (SUM, AVERAGE, ExpectationApproximation.CHEN)),
    ],
    ids=str,
)
def test_other_strategies_have_no_counterpart(curvature: str, strategies: Any) -> None:
    with pytest.raises(UnsupportedError, match="defines no quantity here"):
        HBP(curvature, *strategies)


def test_spectrum_of_nothing() -> None:
    """With ``inputs``, a pass may reach one of two calls that share a parameter."""
    seen: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        seen.append(net.shared(x).tanh())
        return net.shared(seen[0])

    model, lossfunc = extend(Net(forward, shared=nn.Linear(3, 3))), extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long))
    with backpack(GGNGram(), ClippedSumGrad(1.0)):
        loss.backward(inputs=seen)
    assert not any(hasattr(p, "ggn_gram") for p in model.parameters())


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("widths", [(3, 4, 3), (3, 3), (4, 2)])
@pytest.mark.parametrize("is_loop", [False, True])
def test_one_sample_as_a_vector(is_loop: bool, widths: tuple[int, ...], extension: Any) -> None:
    """Its entries are no samples, also where the loss has as many."""
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model, lossfunc = extend(nn.Sequential(*layers)), extend(nn.MSELoss())
    x, y = torch.randn(5, widths[0]), torch.randn(5, widths[-1])
    losses = [lossfunc(model(row), target) for row, target in zip(x, y, strict=True)]
    with pytest.raises(ShapeError, match="unsqueeze"), backpack(extension()):
        (sum(losses) if is_loop else losses[0]).backward()
