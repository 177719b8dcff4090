"""Kronecker factors of tables, and what takes the place of factors where there are none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.contract.extension import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import EKFAC, KFAC, KFLR, DiagGGNExact
from tests import oracle
from tests.cases import Net, Problem

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


class Token(nn.Module):
    """A module without a rule, whose parameter has no structure."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.token.sum(0))


def table(samples: int = 4, words: int = 3, **options: int) -> Problem:
    """A table of five rows, and a linear map of the mean over words."""
    model = Net(
        lambda net, x: net.head(net.table(x).tanh().mean(1)),
        table=nn.Embedding(5, 3, **options),
        head=nn.Linear(3, 4),
    )
    words_ = torch.randint(0, 5, (samples, words))
    return Problem(model, (words_,), nn.CrossEntropyLoss(), torch.randint(0, 4, (samples,)))


def plain() -> Problem:
    model = nn.Sequential(nn.Linear(3, 3), Token(), nn.Linear(3, 4))
    return Problem(model, (torch.randn(3, 3),), nn.CrossEntropyLoss(), torch.randint(0, 4, (3,)))


def blocks(problem: Problem) -> list[Tensor]:
    return [ggn.sum(0) for ggn in problem.expected(oracle.ggn)]


def test_a_single_look_up_is_exact() -> None:
    problem = table(samples=1, words=1)
    expected = blocks(problem)
    problem.run(KFLR(), EKFAC(mc_samples=None))
    weight = problem.parameters[0]
    assert [list(factor.shape) for factor in weight.kflr] == [[3, 3], [5]]
    oracle.assert_close(weight.kflr.dense(), expected[0])
    oracle.assert_close(weight.ekfac.dense(), expected[0])


@pytest.mark.parametrize("sharing", ["kfc", "expand", "reduce"])
def test_factors_are_those_of_the_linear_map_of_unit_vectors(sharing: str) -> None:
    problem = table()
    problem.run(KFLR(sharing), EKFAC(None, sharing))
    ours = problem.parameters[0]
    linear = nn.Linear(5, 3, bias=False)
    linear.weight.data = ours.detach().T.clone()
    model = Net(
        lambda net, x: net.head(net.table(x).tanh().mean(1)),
        table=linear,
        head=problem.model.head,
    )
    hot = nn.functional.one_hot(problem.inputs[0], 5).double()
    other = Problem(model, (hot,), nn.CrossEntropyLoss(), problem.target)
    other.run(KFLR(sharing), EKFAC(None, sharing))
    for mine, theirs in zip(ours.kflr, linear.weight.kflr, strict=True):
        oracle.assert_close(torch.diag(mine) if mine.dim() == 1 else mine, theirs)
    vector = torch.randn_like(ours)
    for name in ("kflr", "ekfac"):
        expected = getattr(linear.weight, name).matmul(vector.T).T
        oracle.assert_close(getattr(ours, name).matmul(vector), expected)
    solved = linear.weight.kflr.solve(vector.T, damping=0.1).T
    oracle.assert_close(ours.kflr.solve(vector, damping=0.1), solved)
    oracle.assert_close(ours.kflr.diagonal(), linear.weight.kflr.diagonal().T)


@pytest.mark.parametrize("chunk", [1, 3])
def test_columns_in_chunks(chunk: int) -> None:
    problem = table()
    problem.run(KFLR())
    whole = [factor.clone() for factor in problem.parameters[0].kflr]
    problem.run(KFLR(chunk_size=chunk))
    for mine, theirs in zip(problem.parameters[0].kflr, whole, strict=True):
        oracle.assert_close(mine, theirs)


EXTENSIONS: dict[str, type[Extension]] = {"kfac": KFAC, "kflr": KFLR, "ekfac": EKFAC}


@pytest.mark.parametrize("field", EXTENSIONS)
def test_without_structure_it_says_what_to_do(field: str) -> None:
    with pytest.raises(UnsupportedError, match='fail_mode="block" or "diagonal"'):
        plain().run(EXTENSIONS[field]())


@pytest.mark.parametrize("mode", ["block", "diagonal"])
def test_what_takes_the_place_of_factors(mode: str) -> None:
    problem = plain()
    expected = blocks(problem)[2]
    problem.run(KFLR(fail_mode=mode), EKFAC(mc_samples=None, fail_mode=mode), DiagGGNExact())
    token = problem.parameters[2]
    assert token.kflr.structure == mode
    right = expected if mode == "block" else torch.diag(expected.diagonal())
    oracle.assert_close(token.kflr.dense(), right)
    oracle.assert_close(token.ekfac.dense(), right)
    oracle.assert_close(token.kflr.diagonal(), token.diag_ggn_exact)
    first = problem.parameters[0].kflr
    assert first.structure == "kronecker"
    assert [list(factor.shape) for factor in first] == [[3, 3], [3, 3]]
    vector = torch.randn_like(token)
    oracle.assert_close(token.kflr.matmul(vector).flatten(), right @ vector.flatten())


@pytest.mark.parametrize("mode", ["block", "diagonal"])
def test_tied_weights_of_three_forms(mode: str) -> None:
    """A table that is also the weight of the last layer, and of which a bias is computed."""
    problem = table(samples=2)
    model = Net(
        lambda net, x: net.head(net.table(x).tanh().mean(1)) + net.table.weight.square().sum(1),
        table=problem.model.table,
        head=nn.Linear(3, 5),
    )
    model.head.weight = model.table.weight
    problem.model = extend(model)
    with pytest.raises(UnsupportedError, match="AffineProduct, DenseProduct, LookupProduct"):
        problem.run(KFLR())
    expected = blocks(problem)[0]
    problem.run(KFLR(fail_mode=mode))
    found = problem.parameters[0].kflr.dense()
    oracle.assert_close(found, expected if mode == "block" else torch.diag(expected.diagonal()))


def test_a_fallback_adds_up_over_chunks() -> None:
    problem = plain()
    problem.run(KFLR(fail_mode="block"))
    whole = problem.parameters[2].kflr[0].clone()
    loss = problem.loss()
    with backpack(KFLR(fail_mode="block", chunk_size=1)):
        loss.backward()
    oracle.assert_close(problem.parameters[2].kflr[0], whole)


@pytest.mark.usefixtures("without_cudnn")
def test_time_steps_first_have_the_factors_of_samples_first() -> None:
    def model(batch_first: bool) -> Net:
        last = (slice(None), -1) if batch_first else (-1,)
        lstm = nn.LSTM(2, 3, batch_first=batch_first)
        return Net(lambda net, x: net.b(net.a(x)[0][last]), a=lstm, b=nn.Linear(3, 2))

    samples_first, steps_first = model(True), model(False)
    steps_first.load_state_dict(samples_first.state_dict())
    x, y = torch.randn(4, 5, 2), torch.tensor([0, 1, 0, 1])
    for net, axis, given in ((samples_first, 0, x), (steps_first, 1, x.transpose(0, 1))):
        loss = extend(nn.CrossEntropyLoss())(extend(net, batch_axis=axis)(given), y)
        with backpack(KFLR()):
            loss.backward()
    for ours, expected in zip(steps_first.parameters(), samples_first.parameters(), strict=True):
        for factor, reference in zip(ours.kflr, expected.kflr, strict=True):
            oracle.assert_close(factor, reference)


def test_a_parameter_of_a_function_has_the_factors_of_a_module() -> None:
    model = Net(lambda net, x: F.linear(x, net.a.weight).tanh() @ net.w, a=nn.Linear(3, 2))
    model.w = nn.Parameter(torch.randn(2, 2))
    twin = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    twin[0].weight = model.a.weight
    twin[2].weight = nn.Parameter(model.w.detach().T.clone())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    found = []
    for net, weights in ((model, (model.a.weight, model.w)), (twin, (*twin.parameters(),))):
        loss = extend(nn.MSELoss())(extend(net)(x), y)
        with backpack(KFLR()):
            loss.backward()
        found.append([weight.kflr for weight in weights])
    for ours, expected in zip(*found, strict=True):
        for factor, reference in zip(ours, expected, strict=True):
            oracle.assert_close(factor, reference)
