"""Some samples only: one that is named twice counts twice, and final states keep their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core.extensions import (
    EKFAC,
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    GGNGram,
    SqrtGGNExact,
    SumGradSquared,
    Variance,
)
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.core.functional import heads
from tests.faults.refusal import right_or_refused
from tests.loss_cases import LOSSES, LossCase
from tests.secondorder.problems import hessians

INDICES = [[0, 0], [3, 1, 3], [2, -2, 2, 0], [-1, 3, 1]]


class Shift(nn.Module):
    """Has no rule, but a child."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.child(x) + self.shift)


def _attention(net: Net, x: Tensor) -> Tensor:
    tokens = x[:, :, None] * torch.ones(1, 1, 4)
    return net.last(net.attention(tokens, tokens, tokens, need_weights=False)[0].flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(2, 3)
    ),
    "normalised": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
    "in_place": lambda: nn.Sequential(nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Linear(4, 3)),
    "twice": lambda: Net(lambda net, x: net.a(torch.sin(net.a(x))), a=nn.Linear(3, 3)),
    "residual": lambda: Net(
        lambda net, x: net.b((h := net.a(x)) + torch.tanh(h)), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    ),
    "heads": lambda: Net(
        lambda net, x: net.b(heads(net.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    ),
    "no_rule": lambda: nn.Sequential(nn.Linear(3, 4), Shift(), nn.Linear(4, 3)),
    "attention": lambda: Net(
        _attention, attention=nn.MultiheadAttention(4, 2, batch_first=True), last=nn.Linear(12, 3)
    ),
    "recurrent": lambda: Net(
        lambda net, x: net.last(net.cell(x[:, :, None])[0].flatten(1)),
        cell=nn.LSTM(1, 2, batch_first=True),
        last=nn.Linear(6, 3),
    ),
}
SMOOTH = ["mlp", "normalised"]


def _problem(name: str, **options: Any) -> Problem:
    return classification(MODELS[name](), (3,), 4, **options)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("indices", INDICES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_repeated(name: str, indices: list[int]) -> None:
    problem = _problem(name)
    gradients = [g[indices] for g in problem.expected(oracle.individual_gradients)]
    diagonals = [d[indices] for d in problem.expected(oracle.ggn_diagonals)]
    problem.run(
        BatchGrad(indices),
        SumGradSquared(indices),
        BatchL2Grad(indices),
        BatchDotGrad(indices),
        Variance(indices),
        DiagGGNExact(indices),
        BatchDiagGGNExact(indices),
        BatchGrad(savefield="of_all"),
    )
    flat = [g.flatten(1) for g in gradients]
    problem.compare("grad_batch", gradients)
    problem.compare("sum_grad_squared", [g.square().sum(0) for g in gradients])
    problem.compare("batch_l2", [g.square().sum(1) for g in flat])
    problem.compare("batch_dot", [g @ g.T for g in flat])
    problem.compare("variance", [g.var(0, correction=0) for g in gradients])
    problem.compare("diag_ggn_exact", [d.sum(0) for d in diagonals])
    problem.compare("diag_ggn_exact_batch", diagonals)
    problem.compare("of_all", problem.expected(oracle.individual_gradients))


@pytest.mark.parametrize("indices", INDICES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "residual", "heads"])
def test_repeated_in_chunks(name: str, indices: list[int]) -> None:
    problem = _problem(name)
    diagonals = [d[indices].sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.run(DiagGGNExact(indices, chunk_size=1))
    problem.compare("diag_ggn_exact", diagonals)


@pytest.mark.parametrize("indices", INDICES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "convolution", "residual"])
def test_repeated_matrices(name: str, indices: list[int]) -> None:
    """Square roots, Gram matrices and products, all with ``Σ_n`` over the named samples."""
    problem = _problem(name)
    blocks = [block[indices].sum(0) for block in problem.expected(oracle.ggn)]
    problem.run(SqrtGGNExact(subsampling=indices), GGNMP(subsampling=indices),
                GGNGram(subsampling=indices))  # fmt: skip
    for p, block in zip(problem.parameters, blocks, strict=True):
        root, gram, product = p.sqrt_ggn_exact, p.ggn_gram, p.ggnmp  # type: ignore[attr-defined]
        assert root.shape[1] == len(indices)
        rows = root.flatten(2).flatten(0, 1)
        oracle.assert_close(rows.T @ rows, block)
        vectors = torch.randn(2, *p.shape)
        oracle.assert_close(product(vectors).flatten(1), vectors.flatten(1) @ block)
        oracle.assert_close(gram.gram.reshape(len(rows), -1), rows @ rows.T)


@pytest.mark.parametrize("indices", INDICES, ids=str)
@pytest.mark.parametrize("name", SMOOTH)
def test_repeated_hessians(name: str, indices: list[int]) -> None:
    problem = _problem(name)
    blocks = [block[indices] for block in problem.expected(hessians)]
    problem.run(BatchDiagHessian(indices), DiagHessian(indices), HMP(subsampling=indices))
    for p, block in zip(problem.parameters, blocks, strict=True):
        diagonals = block.diagonal(dim1=1, dim2=2).reshape(-1, *p.shape)
        oracle.assert_close(p.diag_h_batch, diagonals)  # type: ignore[attr-defined]
        oracle.assert_close(p.diag_h, diagonals.sum(0))  # type: ignore[attr-defined]
        vectors = torch.randn(2, *p.shape)
        product = p.hmp(vectors).flatten(1)  # type: ignore[attr-defined]
        oracle.assert_close(product, vectors.flatten(1) @ block.sum(0))


@pytest.mark.parametrize("indices", INDICES, ids=str)
@pytest.mark.parametrize("extension", [KFLR, KFRA])
def test_repeated_kronecker_factors(extension: Any, indices: list[int]) -> None:
    """``B`` sums over the named samples, ``A`` averages over them."""
    model = nn.Sequential(nn.Linear(3, 3))
    problem = classification(model, (3,), 4)
    blocks = problem.expected(oracle.ggn)[1][indices].sum(0)
    inputs = problem.inputs[0][indices]
    problem.run(extension(subsampling=indices))
    weight, bias = problem.fields(extension.savefield)
    oracle.assert_close(weight[0], blocks)
    oracle.assert_close(weight[1], inputs.T @ inputs / len(indices))
    oracle.assert_close(bias[0], blocks)


@pytest.mark.parametrize("indices", INDICES, ids=str)
def test_repeated_corrected_eigenvalues(indices: list[int]) -> None:
    problem = _problem("mlp")
    blocks = [block[indices].sum(0) for block in problem.expected(oracle.ggn)]
    problem.run(EKFAC(mc_samples=None, subsampling=indices))
    for ours, block in zip(problem.fields("ekfac"), blocks, strict=True):
        eye = torch.eye(len(block))
        basis = ours.rotate(eye.reshape(-1, *ours.order.shape))
        oracle.assert_close(ours.values.flatten(), (basis.T @ block @ basis).diagonal())


@pytest.mark.parametrize("indices", INDICES, ids=str)
def test_repeated_clipping(indices: list[int]) -> None:
    problem = _problem("residual")
    gradients = [g[indices] for g in problem.expected(oracle.individual_gradients)]
    norms = torch.cat([g.flatten(1) for g in gradients], 1).norm(dim=1)
    bound = float(norms.mean())
    problem.run(ClippedSumGrad(bound, subsampling=indices, normaliser=None))
    weights = (bound / norms).clamp(max=1)
    expected = [torch.einsum("n,n...->...", weights, g) for g in gradients]
    problem.compare("grad_clipped", expected)


@pytest.mark.parametrize("extension", [DiagGGNMC, KFAC])
def test_repeated_monte_carlo(extension: Any) -> None:
    """Of one sample named thrice: three times that of the sample, within 5 standard errors."""
    indices = [1, 1, 1]
    problem = _problem("residual")
    exact = [block[1] * 3 for block in problem.expected(oracle.ggn)]
    draws = []
    for _ in range(20):
        problem.run(extension(mc_samples=500, subsampling=indices))
        fields = problem.fields(extension.savefield)
        last = fields[-1] if extension is DiagGGNMC else fields[-1].dense().diagonal()
        draws.append(last.flatten())
    estimates = torch.stack(draws)
    error = (estimates.mean(0) - exact[-1].diagonal()).abs()
    assert bool((error < 5 * estimates.std(0) / 20**0.5).all())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
def test_repeated_losses(case: LossCase, reduction: str) -> None:
    problem = case.problem(4, reduction)
    indices = [2, 0, 2]
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = problem.expected(oracle.ggn_diagonals)
    problem.run(BatchGrad(indices), DiagGGNExact(indices))
    problem.compare("grad_batch", [g[indices] for g in gradients])
    problem.compare("diag_ggn_exact", [d[indices].sum(0) for d in diagonals])


# Of (sequence, states) to [N, *]: the states have the samples on axis 1.
READINGS: dict[str, Callable[[Any, Any], Tensor]] = {
    "last": lambda y, h: h[-1],
    "all": lambda y, h: h.transpose(0, 1).flatten(1),
    "sine": lambda y, h: torch.sin(h).permute(1, 0, 2).flatten(1),
    "mean": lambda y, h: h.mean(0),
    "with_sequence": lambda y, h: torch.cat([h[-1], y[:, 0]], 1),
    "softmax_over_layers": lambda y, h: (h.softmax(0) * h).sum(0),
}


def _reads_states(
    kind: Callable[..., nn.Module], reading: str, batch: int, **options: Any
) -> Problem:
    def states(result: Any) -> Tensor:
        final = result[1]
        return torch.cat(final) if isinstance(final, tuple) else final

    def forward(net: Net, x: Tensor) -> Tensor:
        result = net.cell(F.pad(x, (1, 0)))
        return net.last(READINGS[reading](result[0], states(result)))

    cell = kind(3, 2, batch_first=True, **options)
    result = cell(torch.randn(2, 3, 3))
    width = READINGS[reading](result[0], states(result)).shape[1]
    return classification(Net(forward, cell=cell, last=nn.Linear(width, 3)), (3, 2), batch)


@pytest.mark.grid(4)
@pytest.mark.parametrize("indices", [[0], [1, 0], None], ids=str)
@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_final_states(kind: Any, reading: str, batch: int, indices: list[int] | None) -> None:
    problem = _reads_states(kind, reading, batch, num_layers=2)
    chosen = slice(None) if indices is None else indices
    gradients = [g[chosen] for g in problem.expected(oracle.individual_gradients)]
    diagonals = [d[chosen].sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.run(BatchGrad(indices), DiagGGNExact(indices))
    problem.compare("grad_batch", gradients)
    problem.compare("diag_ggn_exact", diagonals)


@pytest.mark.parametrize("indices", [[1], [3, 0]], ids=str)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_final_states_of_both_directions(kind: Any, indices: list[int]) -> None:
    problem = _reads_states(kind, "all", 4, bidirectional=True)
    diagonals = [d[indices].sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.run(DiagGGNExact(indices))
    problem.compare("diag_ggn_exact", diagonals)


@pytest.mark.parametrize("indices", [None, [1], [3, 0], [2, 2]], ids=str)
def test_final_states_into_a_second_layer(indices: list[int] | None) -> None:
    """Handed over as they are, with their samples on axis 1."""

    def forward(net: Net, x: Tensor) -> Tensor:
        _, states = net.first(x)
        return net.last(net.second(x, states)[0].flatten(1))

    model = Net(
        forward,
        first=nn.LSTM(2, 3, batch_first=True),
        second=nn.LSTM(2, 3, batch_first=True),
        last=nn.Linear(9, 3),
    )
    problem = classification(model, (3, 2), 4)
    diagonals = problem.expected(oracle.ggn_diagonals)
    chosen = slice(None) if indices is None else indices
    with right_or_refused("initial state", may_refuse=indices is not None):
        problem.run(DiagGGNExact(indices))
        problem.compare("diag_ggn_exact", [d[chosen].sum(0) for d in diagonals])


@pytest.mark.parametrize("reading", ["last", "all"])
def test_debug_with_final_states(reading: str) -> None:
    """Nothing mixes there."""
    problem = _reads_states(nn.LSTM, reading, 4, num_layers=2)
    gradients = problem.expected(oracle.individual_gradients)
    problem.run(BatchGrad(), debug=True)
    problem.compare("grad_batch", gradients)


@pytest.mark.parametrize("case", [c for c in LOSSES if c.id in {"ce", "mse", "ce-2"}],
                         ids=lambda case: case.id)  # fmt: skip
def test_debug_with_an_unreduced_loss(case: LossCase) -> None:
    """The summed one, with what the probe needs to see of the samples."""
    problem = case.problem(4, "sum")
    gradients = problem.expected(oracle.individual_gradients)
    problem.lossfunc = Net(
        lambda net, out, y: net.loss(out, y).sum(), loss=case.make(reduction="none")
    )
    problem.run(BatchGrad(), DiagGGNExact(), debug=True)
    problem.compare("grad_batch", gradients)
