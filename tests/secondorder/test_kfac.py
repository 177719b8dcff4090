"""Kronecker-factored curvature: KFAC and KFLR."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from backpack_core import View
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.extensions import EKFAC, KFAC, KFLR, KFRA, SqrtGGNExact
from backpack_core.testing import temporary_plugin
from backpack_layers.linear import LinearRule
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.propagators import LossSqrt
from tests import oracle
from tests.cases import Net, classification
from tests.secondorder.factors import SAMPLED_RTOL, SAMPLES, covariance, inputs_of, layers
from tests.secondorder.problems import CHAINS, SETTINGS, make


@pytest.mark.parametrize(("batch", "reduction", "loss"), SETTINGS[1:])
@pytest.mark.parametrize("net", CHAINS)
def test_kflr_conventions(net: str, batch: int, reduction: str, loss: str) -> None:
    """``B`` is the block of the bias, with the scale of the loss; ``A`` an average over samples."""
    problem = make(net, batch, reduction, loss)
    blocks = dict(zip(problem.parameters, problem.expected(oracle.ggn), strict=True))
    received = inputs_of(problem)
    problem.run(KFLR())
    for layer in layers(problem):
        (own,) = layer.bias.kflr
        oracle.assert_close(own, blocks[layer.bias].sum(0))
        outer, inner = layer.weight.kflr
        oracle.assert_close(outer, own)
        oracle.assert_close(inner, covariance(layer, received[layer]))


@pytest.mark.parametrize("net", ["mlp", "convolutions"])
def test_kfac_is_kflr_in_expectation(net: str) -> None:
    problem = make(net, 2)
    problem.run(KFLR(), KFAC(SAMPLES))
    for p in problem.parameters:
        for sampled, exact in zip(p.kfac, p.kflr, strict=True):
            oracle.assert_close(sampled, exact, SAMPLED_RTOL)


@pytest.mark.parametrize("net", ["mlp", "deep", "piecewise", "frozen"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_exact_for_one_sample(net: str, reduction: str) -> None:
    problem = make(net, 1, reduction)
    blocks = problem.expected(oracle.ggn)
    problem.run(KFLR(), EKFAC(None), *([] if net == "frozen" else [KFRA()]))
    for p, block in zip(problem.parameters, blocks, strict=True):
        oracle.assert_close(p.kflr.dense(), block.sum(0))
        oracle.assert_close(p.ekfac.dense(), block.sum(0))
        if net != "frozen":
            oracle.assert_close(p.kfra.dense(), block.sum(0))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_exact_for_deep_linear_nets(reduction: str) -> None:
    """All samples have one Jacobian and one loss Hessian: the expectation factorises."""
    problem = make("mlp", 5, reduction, "mse")
    problem.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 3))
    blocks = problem.expected(oracle.ggn)
    problem.run(KFLR(), KFRA(), EKFAC(None))
    for p, block in zip(problem.parameters, blocks, strict=True):
        for field in ("kflr", "kfra", "ekfac"):
            oracle.assert_close(getattr(p, field).dense(), block.sum(0))


@pytest.mark.parametrize("setting", ["expand", "reduce"])
def test_weight_sharing_is_exact_for_deep_linear_nets(setting: Any) -> None:
    """Eschenhagen et al. (2023), propositions 2 and 3."""
    inner = [nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)]
    problem = make("mlp", 3, "mean", "mse")
    problem.inputs = (torch.randn(3, 5, 4),)
    if setting == "expand":
        problem.model = nn.Sequential(*inner)
        problem.target = torch.randn(3, 5, 2)
    else:
        parts = {"a": inner[0], "b": inner[1]}
        problem.model = Net(lambda net, x: net.b(net.a(x)).mean(1), **parts)
        problem.target = torch.randn(3, 2)
    blocks = problem.expected(oracle.ggn)
    problem.run(KFLR(setting))
    for p, block in zip(problem.parameters, blocks, strict=True):
        oracle.assert_close(p.kflr.dense(), block.sum(0))


def test_weight_sharing_changes_nothing_for_one_position() -> None:
    problem = make("mlp")
    problem.run(KFLR(), KFLR("expand", savefield="expanded"), KFLR("reduce", savefield="reduced"))
    for p in problem.parameters:
        for field in ("expanded", "reduced"):
            oracle.assert_close(getattr(p, field).dense(), p.kflr.dense())


@pytest.mark.parametrize("extension", [KFAC, KFLR, KFRA, EKFAC])
def test_unknown_weight_sharing(extension: Any) -> None:
    with pytest.raises(UsageError, match="'kfc', 'expand', 'reduce'"):
        extension(weight_sharing="sum")


def test_it_is_the_list_of_factors() -> None:
    problem = make("mlp")
    problem.run(KFAC())
    weight, bias = problem.parameters[:2]
    assert isinstance(weight.kfac, list)
    assert [tuple(f.shape) for f in weight.kfac] == [(5, 5), (4, 4)]
    assert len(bias.kfac) == 1


@pytest.mark.parametrize("weight_sharing", ["kfc", "expand"])
def test_bias_and_weight_share_work_but_no_memory(weight_sharing: Any) -> None:
    problem = make("convolutions")
    problem.run(KFLR(weight_sharing=weight_sharing))
    expected = [[f.clone() for f in factors] for factors in problem.fields("kflr")]
    conv = next(m for m in problem.model.modules() if isinstance(m, nn.Conv2d) and m.groups == 1)
    outer, bias = conv.weight.kflr[0], conv.bias.kflr[0]
    assert outer.data_ptr() != bias.data_ptr()
    if weight_sharing == "kfc":
        oracle.assert_close(bias, outer)

    def spoil(module: nn.Module) -> None:
        for parameter in module.parameters():
            for factor in parameter.kflr:
                factor.mul_(2)

    problem.run(KFLR(weight_sharing=weight_sharing), extension_hook=spoil)
    for ours, whole in zip(problem.fields("kflr"), expected, strict=True):
        for factor, reference in zip(ours, whole, strict=True):
            oracle.assert_close(factor, 2 * reference)


class Reversed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias.flip(0)


class ReversedRule(LinearRule):
    module_types = (Reversed,)

    def arrangement(self, view: View, name: str) -> Callable[[Tensor], Tensor] | None:
        return (lambda mat: mat.flatten(-2).flip(-1)) if name == "bias" else None


def test_bias_in_an_order_of_its_own() -> None:
    with temporary_plugin(ReversedRule):
        problem = classification(nn.Sequential(Reversed(3, 4), nn.Tanh(), nn.Linear(4, 3)), (3,))
        blocks = problem.expected(oracle.ggn)
        problem.run(KFLR())
        oracle.assert_close(problem.parameters[1].kflr[0], blocks[1].sum(0))


def test_groups_have_a_factor_each() -> None:
    problem = make("grouped", 1)
    blocks = problem.expected(oracle.ggn)
    problem.run(KFLR("expand"), KFLR(savefield="kfc"))
    conv = problem.model[0]  # type: ignore[index]
    assert [tuple(f.shape) for f in conv.weight.kflr] == [(2, 2, 2), (2, 2, 2)]
    dense = conv.weight.kflr.dense()
    assert not dense[:4, 4:].any()  # nothing between groups
    oracle.assert_close(conv.bias.kfc[0], blocks[1].sum(0))
    # By hand: each group is a convolution of its own.
    x = problem.inputs[0]
    for g in range(2):
        rows = F.unfold(x[:, g : g + 1].unsqueeze(2), (1, 2))
        oracle.assert_close(conv.weight.kfc[1][g], torch.einsum("nis,njs->ij", rows, rows) / len(x))
        own = conv.bias.kfc[0][2 * g : 2 * g + 2, 2 * g : 2 * g + 2]
        oracle.assert_close(conv.weight.kfc[0][g], own)


def test_vectors_get_their_block() -> None:
    problem = make("normalised", 3)
    blocks = dict(zip(problem.parameters, problem.expected(oracle.ggn), strict=True))
    problem.run(KFLR())
    norm = problem.model[1]  # type: ignore[index]
    for p in (norm.weight, norm.bias):
        oracle.assert_close(p.kflr[0], blocks[p].sum(0))


def test_recurrent_layers_have_structure() -> None:
    parts = {"rnn": nn.RNN(2, 3, batch_first=True), "last": nn.Linear(3, 3)}
    net = Net(lambda net, x: net.last(net.rnn(x)[0][:, -1]), **parts)
    problem = classification(net, (1, 2), 1)
    blocks = problem.expected(oracle.ggn)
    problem.run(KFLR())
    for p, block in zip(problem.parameters, blocks, strict=True):
        if block.any():  # one time step: the recurrent weight multiplies zero
            oracle.assert_close(p.kflr.dense(), block.sum(0))


class Outer(nn.Module):
    """A module without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight @ (self.weight * self.weight)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("extension", [KFAC, KFLR, EKFAC])
def test_no_structure(extension: Any) -> None:
    net = Net(lambda net, x: net.last(net.first(x)), first=Outer(), last=nn.Linear(2, 3))
    problem = classification(net, (2,))
    with pytest.raises(UnsupportedError, match="no common Kronecker factors"):
        problem.run(extension())
    problem.run(extension(fail_mode="silent"))
    assert not hasattr(net.first.weight, extension.savefield)
    assert hasattr(net.last.weight, extension.savefield)


@pytest.mark.parametrize("uses", [1, 2])
def test_no_structure_of_a_weight_that_is_computed(uses: int) -> None:
    """The message says so: the layer itself has factors."""
    net = Net(lambda net, x: sum((net.last(k * x) for k in range(uses)), net.last(x)),
              last=parametrizations.spectral_norm(nn.Linear(2, 3)).eval())  # fmt: skip
    with pytest.raises(UnsupportedError, match="a tensor that is computed from"):
        classification(net, (2,)).run(KFLR())


def test_no_structure_of_a_table_in_averages() -> None:
    net = Net(lambda net, x: net.last(net.table(x).flatten(1)), table=nn.Embedding(5, 2),
              last=nn.Linear(4, 3))  # fmt: skip
    problem = classification(net, (2,))
    problem.inputs = (torch.randint(0, 5, (3, 2)),)
    with pytest.raises(UnsupportedError, match=r"Kronecker structure.* declares none"):
        problem.run(KFRA())
    problem.run(KFRA(fail_mode="silent"))
    assert not hasattr(net.table.weight, "kfra")
    assert hasattr(net.last.weight, "kfra")


def test_subsampling() -> None:
    """The chosen samples alone, but for the scale of the mean."""
    problem = make("convolutions", 4)
    problem.run(KFLR(subsampling=[2, 0]), KFRA(subsampling=[2, 0]))
    ours = [[list(p.kflr), list(p.kfra)] for p in problem.parameters]
    problem.inputs = (problem.inputs[0][[2, 0]],)
    problem.target = problem.target[[2, 0]]
    problem.run(KFLR(), KFRA())
    for p, pair in zip(problem.parameters, ours, strict=True):
        for factors, field in zip(pair, ("kflr", "kfra"), strict=True):
            first, *others = getattr(p, field)
            oracle.assert_close(factors[0], first / 2)
            for factor, other in zip(factors[1:], others, strict=True):
                oracle.assert_close(factor, other)


def test_propagators_are_shared() -> None:
    assert KFLR().propagator == EKFAC(None).propagator == LossSqrt()
    assert KFAC(3).propagator == EKFAC(3).propagator != LossSqrt()


def test_columns_with_structure_from_elsewhere() -> None:
    """An exact block is what a Kronecker product of one factor means."""
    problem = make("mlp")
    problem.run(KFLR())
    factors = problem.parameters[1].kflr
    assert isinstance(factors, KroneckerFactors)
    oracle.assert_close(factors.dense(), factors[0])


def test_an_unknown_fail_mode_says_all_there_are() -> None:
    with pytest.raises(UsageError, match=r"'block', 'diagonal'\)\. Got 'blok'"):
        KFAC(fail_mode="blok")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("shape", [(), (3,)])
def test_vectors_and_numbers_have_their_block(shape: tuple[int, ...]) -> None:
    """Also where they enter nonlinearly, and no rule knows how."""
    gain = nn.Parameter(torch.randn(shape))
    problem = classification(Net(lambda net, x: net.last(x * net.gain.exp()), gain=gain,
                                 last=nn.Linear(3, 3)), (3,))  # fmt: skip
    problem.run(KFLR(), SqrtGGNExact())
    (factor,) = vars(gain)["kflr"]
    root = vars(gain)["sqrt_ggn_exact"].reshape(-1, gain.numel())
    oracle.assert_close(factor, root.T @ root)
