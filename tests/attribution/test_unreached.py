"""Experts that get no token of some batches: gradients of zero there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_attribution import (
    TRAK,
    GradCosine,
    GradDot,
    GradientStore,
    Influence,
    LoGra,
    Method,
    fill,
    influence,
    project,
    self_influence,
)
from backpack_core.errors import UnsupportedError
from backpack_firstorder import Projection
from tests.attribution.problems import gradients
from tests.oracle import assert_close


class Mixture(nn.Module):
    """Each sample goes to one expert; the others are not called, or with no sample."""

    def __init__(self, is_called: bool) -> None:
        super().__init__()
        self.is_called = is_called
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden, number = torch.tanh(self.first(x)), (3 * x[:, 0]).long().clamp(0, 2)
        out = torch.zeros_like(hidden)
        for k, expert in enumerate(self.experts):
            which = torch.where(number == k)[0]
            if len(which) or self.is_called:
                out = out.index_add(0, which, expert(hidden[which]))
        result: Tensor = self.last(torch.tanh(out))
        return result


def _model(is_called: bool = False) -> Mixture:
    torch.manual_seed(0)
    return Mixture(is_called).eval()


# In order, so that batches of two go to one expert or two.
X = torch.linspace(0, 0.99, 24, dtype=torch.float64).view(8, 3).flip(1).contiguous()
Y = torch.arange(8) % 2
DATA = [(X[n : n + 2], Y[n : n + 2]) for n in range(0, 8, 2)]
QUERIES = [DATA[0], DATA[-1]]
LOSS = nn.CrossEntropyLoss()


def test_batches_reach_different_experts() -> None:
    numbers = [{*(3 * x[:, 0]).long().tolist()} for x, _ in DATA]
    assert numbers[0] != numbers[-1]


@pytest.mark.parametrize("train", [DATA, DATA[1:-1]], ids=["all", "some"])
@pytest.mark.parametrize(
    "method", [GradDot(), GradCosine(), LoGra(4), TRAK(4, damping=0.1)], ids=str
)
def test_scores(method: Method, train: list[Any]) -> None:
    """As where each expert is called, also where queries reach one that no training sample does."""
    found = influence(_model(), LOSS, train, QUERIES, method, progress=False).values
    expected = influence(_model(True), LOSS, train, QUERIES, method, progress=False).values
    assert_close(torch.as_tensor(found), torch.as_tensor(expected))


def test_scores_in_half_precision() -> None:
    """Projections are in single precision, also where a batch does not reach a parameter."""
    model = _model().bfloat16()
    train, queries = ([(x.bfloat16(), y) for x, y in data] for data in (DATA[1:-1], QUERIES))
    found = influence(model, LOSS, train, queries, LoGra(4), progress=False).values
    assert found.dtype == torch.float32


def test_inner_products_and_norms() -> None:
    own = gradients(_model(True), (X, Y))
    asked = own[[0, 1, 6, 7]]
    found = influence(_model(), LOSS, DATA, QUERIES, GradDot(), progress=False).values
    assert_close(torch.as_tensor(found), own @ asked.T)
    norms: Any = self_influence(_model(), LOSS, DATA, GradDot(), progress=False)
    assert_close(torch.as_tensor(norms.values).flatten(), own.square().sum(1))


def test_projections() -> None:
    found = project(_model(), LOSS, DATA, Projection(4))
    expected = project(_model(True), LOSS, DATA, Projection(4))
    for name, value in expected.items():
        assert_close(found[name], value)


def test_factors_that_some_batches_lack_are_refused() -> None:
    """They are averages over the samples that reached the parameter."""
    with pytest.raises(UnsupportedError, match="1 of 4 batches reached the parameter"):
        influence(_model(), LOSS, DATA, QUERIES, "ekfac", progress=False)


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("projection", [None, Projection(4)])
def test_stores(projection: Projection | None, rank: int | None, tmp_path: Path) -> None:
    """Rows of all batches have the same parts, in a store that is filled in two runs, too."""
    rows = {}
    for is_called in (False, True):
        settings: dict[str, Any] = {"dtype": torch.float64, "rank": rank}
        for some in (DATA[:2], DATA):
            with GradientStore(tmp_path / str(is_called), **settings) as store:
                fill(store, _model(is_called), LOSS, some, projection, progress=False)
        rows[is_called] = [block.gradients for block in store.blocks()]
    for ours, expected in zip(rows[False], rows[True], strict=True):
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            dense = [v if isinstance(v, Tensor) else v.dense() for v in (ours[name], value)]
            assert_close(*dense)


class TwoHeads(nn.Module):
    """Queries end at the first head, training samples at the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, is_query: Tensor | None = None) -> Tensor:
        head: Tensor = self.first(x)
        return self.second(torch.tanh(head)) if is_query is None else head


def test_the_exact_matrix_couples_parameters_that_queries_do_not_reach() -> None:
    torch.manual_seed(0)
    model, squares = TwoHeads(), nn.MSELoss(reduction="sum")
    targets = torch.randn(8, 2)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def asked(output: Tensor, target: Tensor) -> Tensor:
        return output.square().sum()

    def outputs(values: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(model, values, (X,))
        return found.flatten()

    jacobians = torch.func.jacrev(outputs)(values)
    rows = torch.cat([jacobians[name].flatten(1) for name in values], 1)
    matrix = 2 * rows.T @ rows + 0.1 * torch.eye(rows.shape[1])
    own = gradients(model, (X, targets), squares)
    first = gradients(model.first, (X[:2], targets[:2]), asked)
    query = torch.cat([first, torch.zeros(2, len(matrix) - first.shape[1])], 1)
    found = influence(
        model,
        squares,
        [(X, targets)],
        [((X[:2], torch.ones(2)), targets[:2])],
        Influence(damping=0.1, refine=100, rtol=1e-12),
        query_lossfunc=asked,
        progress=False,
    )
    expected = own @ torch.linalg.solve(matrix, query.T)
    assert_close(torch.as_tensor(found.values), expected)
    ends, own = [((X[:2], torch.ones(2)), targets[:2])], torch.zeros(2, len(matrix))
    own[:, : first.shape[1]] = gradients(model.first, (X[:2], targets[:2]), squares)
    method = Influence(damping=0.1, refine=100, rtol=1e-12, curvature_loader=[(X, targets)])
    found = self_influence(model, squares, ends, method, progress=False)
    # Curvature of eight samples, for a sum over two.
    matrix = 2 / 8 * 2 * rows.T @ rows + 0.1 * torch.eye(rows.shape[1])
    expected = (own @ torch.linalg.solve(matrix, own.T)).diagonal().unsqueeze(1)
    assert_close(torch.as_tensor(found.values), expected)
