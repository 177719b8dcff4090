"""Diagonals and square roots of the generalised Gauss-Newton matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_core.extensions import (
    KFLR,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    DiagGGNExact,
    DiagGGNMC,
    SqrtGGNExact,
    SqrtGGNMC,
)
from backpack_layers.linear import LinearRule
from backpack_products import SecondOrderExtension, contractions
from backpack_products.rows import Rows
from tests import oracle
from tests.secondorder.problems import NETS, SETTINGS, make

# One draw of a column has a relative standard deviation of about one.
SAMPLES, SAMPLED_RTOL = 40_000, 0.03


def outer(root: Tensor) -> Tensor:
    """``Σ_v M[v, n] M[v, n]ᵀ``. Shape ``[N, P, P]``."""
    flat = root.flatten(2)
    return torch.einsum("vna,vnb->nab", flat, flat)


@pytest.mark.parametrize(("batch", "reduction", "loss"), SETTINGS)
@pytest.mark.parametrize("net", NETS)
def test_exact(net: str, batch: int, reduction: str, loss: str) -> None:
    problem = make(net, batch, reduction, loss)
    expected = problem.expected(oracle.ggn_diagonals)
    blocks = problem.expected(oracle.ggn)
    problem.run(DiagGGNExact(), BatchDiagGGNExact(), SqrtGGNExact())
    problem.compare("diag_ggn_exact", [d.sum(0) for d in expected])
    problem.compare("diag_ggn_exact_batch", expected)
    for p, block in zip(problem.parameters, blocks, strict=True):
        columns = 3 - isinstance(problem.lossfunc, nn.CrossEntropyLoss)
        assert p.sqrt_ggn_exact.shape == (columns, batch, *p.shape)
        oracle.assert_close(outer(p.sqrt_ggn_exact), block)


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_sampled(loss: str) -> None:
    problem = make("mlp", 2, "mean", loss)
    expected = problem.expected(oracle.ggn_diagonals)
    problem.run(DiagGGNMC(SAMPLES), BatchDiagGGNMC(SAMPLES), SqrtGGNMC(SAMPLES))
    for p, diagonal in zip(problem.parameters, expected, strict=True):
        oracle.assert_close(p.diag_ggn_mc_batch, diagonal, SAMPLED_RTOL)
        oracle.assert_close(p.diag_ggn_mc, diagonal.sum(0), SAMPLED_RTOL)
        assert p.sqrt_ggn_mc.shape == (SAMPLES, 2, *p.shape)
        oracle.assert_close(p.sqrt_ggn_mc.square().sum(0), p.diag_ggn_mc_batch)


def test_one_sample_by_default() -> None:
    problem = make("mlp")
    problem.run(SqrtGGNMC())
    assert all(len(root) == 1 for root in problem.fields("sqrt_ggn_mc"))
    assert SqrtGGNMC(7).get_num_mc_samples() == 7


def test_subsampling_keeps_the_scale() -> None:
    problem = make("convolutions")
    problem.run(SqrtGGNExact(), BatchDiagGGNExact())
    roots, diagonals = problem.fields("sqrt_ggn_exact"), problem.fields("diag_ggn_exact_batch")
    chosen = [3, 1]
    problem.run(*(e(subsampling=chosen) for e in (SqrtGGNExact, BatchDiagGGNExact, DiagGGNExact)))
    problem.compare("sqrt_ggn_exact", [root[:, chosen] for root in roots])
    problem.compare("diag_ggn_exact_batch", [d[chosen] for d in diagonals])
    problem.compare("diag_ggn_exact", [d[chosen].sum(0) for d in diagonals])


@pytest.mark.parametrize("size", [1, 2, 100])
def test_chunks_of_columns(size: int) -> None:
    problem = make("convolutions")
    extensions = (DiagGGNExact, BatchDiagGGNExact, SqrtGGNExact, KFLR)
    problem.run(*(e() for e in extensions))
    fields = ["diag_ggn_exact", "diag_ggn_exact_batch", "sqrt_ggn_exact"]
    expected = {name: problem.fields(name) for name in fields}
    factors = problem.fields("kflr")
    problem.run(DiagGGNExact(chunk_size=size), *(e() for e in extensions[1:]))
    for name in fields:
        problem.compare(name, expected[name])
    for ours, whole in zip(problem.fields("kflr"), factors, strict=True):
        for factor, reference in zip(ours, whole, strict=True):
            oracle.assert_close(factor, reference)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_bad_chunk_size(size: object) -> None:
    with pytest.raises(UsageError, match="chunk_size must be a positive integer"):
        DiagGGNExact(chunk_size=size)


def test_shared_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    problem = make("mlp")
    problem.model, problem.inputs = model, (torch.randn(4, 3),)
    expected = problem.expected(oracle.ggn)
    problem.run(SqrtGGNExact())
    for p, block in zip(problem.parameters, expected, strict=True):
        oracle.assert_close(outer(p.sqrt_ggn_exact), block)


def test_columns_are_pushed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    plain = LinearRule._jac_t_mat_prod

    def counting(self: LinearRule, call: object, mat: Tensor) -> Tensor:
        pushed.append(call.path)  # type: ignore[attr-defined]
        return plain(self, call, mat)  # type: ignore[arg-type]

    monkeypatch.setattr(LinearRule, "_jac_t_mat_prod", counting)
    problem = make("piecewise")
    problem.run(DiagGGNExact(), BatchDiagGGNExact(), SqrtGGNExact(), KFLR(), check="never")
    assert pushed == ["Linear '4'", "Linear '2'"]  # nothing lies before the first one


def test_the_diagonal_comes_from_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where positions share the weight, nothing is contracted twice."""
    problem = make("convolutions")
    positions = []
    original = contractions.square_sum

    def count(out: Tensor, inp: Rows, known: Tensor | None) -> Tensor:
        positions.append(out.shape[2])
        return original(out, inp, known)

    monkeypatch.setattr(contractions, "square_sum", count)
    problem.run(DiagGGNExact(), BatchDiagGGNExact())
    assert set(positions) <= {1}
    problem.compare("diag_ggn_exact", [d.sum(0) for d in problem.fields("diag_ggn_exact_batch")])
    problem.run(DiagGGNExact())
    assert max(positions) > 1


def test_columns_are_squared_once_for_weight_and_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make("mlp")
    squared = []
    original = contractions.squares

    def count(out: Tensor) -> Tensor:
        squared.append(out.shape[4])
        return original(out)

    monkeypatch.setattr(contractions, "squares", count)
    problem.run(DiagGGNExact(), check="never")
    layers = [m for m in problem.model.modules() if isinstance(m, torch.nn.Linear)]
    assert squared == [layer.out_features for layer in reversed(layers)]
    blocks = [block.sum(0) for block in problem.expected(oracle.ggn)]
    parameters = problem.parameters
    expected = [b.diagonal().view_as(p) for b, p in zip(blocks, parameters, strict=True)]
    problem.compare("diag_ggn_exact", expected)


@pytest.mark.parametrize("extension", [BatchDiagGGNExact, DiagGGNExact, SqrtGGNExact])
def test_results_are_their_own(extension: type[SecondOrderExtension]) -> None:
    problem = make("convolutions")
    problem.run(extension(savefield="first"), extension(savefield="second"))
    expected = [value.clone() for value in problem.fields("second")]
    for value in problem.fields("first"):
        value.mul_(0)
    problem.compare("second", expected)


def test_two_losses() -> None:
    """Two losses on one output: their matrices add up."""
    problem = make("mlp")
    model, (x,), other = problem.model, problem.inputs, nn.MSELoss()
    target = torch.randn(4, 3)
    blocks = problem.expected(oracle.ggn)
    problem.lossfunc, labels = other, problem.target
    problem.target = target
    more = problem.expected(oracle.ggn)
    extend(model), extend(other)
    first = extend(nn.CrossEntropyLoss())
    output = model(x)
    with backpack(SqrtGGNExact(), DiagGGNExact()):
        (first(output, labels) + 2 * other(output, target)).backward()
    for p, one, two in zip(problem.parameters, blocks, more, strict=True):
        assert len(p.sqrt_ggn_exact) == 2 + 3
        oracle.assert_close(outer(p.sqrt_ggn_exact), one + 2 * two)
        total = (one + 2 * two).sum(0).diagonal()
        oracle.assert_close(p.diag_ggn_exact.flatten(), total)
