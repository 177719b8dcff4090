"""Methods in a space of projections: exact where nothing is lost, and their formulas elsewhere."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from backpack_attribution import (
    TRAK,
    GradientStore,
    LoGra,
    fill,
    influence,
    preconditioned,
    project,
)
from backpack_attribution.margins import Margin
from backpack_attribution.problem import Problem
from backpack_attribution.projected import inverse_product, projections_of
from backpack_core.errors import RangeWarning, UsageError
from backpack_firstorder import Projection
from backpack_layers.language import CausalLMLoss
from tests.attribution.problems import gradients, loader, mlp, tied, tokens, vectors

NETS = {"mlp": (mlp, vectors), "tied": (tied, tokens)}


@pytest.fixture(params=NETS)
def problem(request):
    net, data = NETS[request.param]
    return net(), data(9), data(3, seed=2)


def features(problem: Problem, data, projection: Projection) -> dict[str, torch.Tensor]:
    with problem.extended():
        return projections_of(problem, data, projection)


def test_logra_is_influence_of_the_projected_gradients(problem) -> None:
    model, train, queries = problem
    lossfunc, projection = nn.CrossEntropyLoss(), Projection(6, "gaussian", 3)
    method = LoGra(6, "gaussian", 3, damping=0.2)
    scores = influence(model, lossfunc, loader(train, 4), loader(queries, 2), method)
    known = Problem(model, lossfunc)
    f, q = features(known, train, projection), features(known, queries, projection)
    wanted = torch.zeros(9, 3)
    for name, rows in f.items():
        moments = rows.T @ rows
        shift = 0.2 * moments.trace() / 6 * torch.eye(6)
        wanted += rows @ torch.linalg.solve(moments + shift, q[name].T)
    assert torch.allclose(scores.values, wanted.cpu(), rtol=1e-8, atol=1e-8)
    assert scores.method == "logra"


def test_trak_is_the_linear_model_of_margins(problem) -> None:
    model, train, queries = problem
    states = [model.state_dict(), {n: 1.5 * v for n, v in model.state_dict().items()}]
    states = [{n: v.clone() for n, v in state.items()} for state in states]
    method = TRAK(4, states, "gaussian", seed=3)
    lossfunc = nn.CrossEntropyLoss()
    scores = influence(model, lossfunc, loader(train, 4), loader(queries, 2), method)
    products, misses = torch.zeros(9, 3), torch.zeros(9)
    for number, state in enumerate(states):
        model.load_state_dict(state)
        known = Problem(model, Margin(lossfunc))
        projection = Projection(4, "gaussian", 3 + number)
        f, q = (sum(features(known, d, projection).values()) for d in (train, queries))
        products += f @ torch.linalg.solve(f.T @ f, q.T) / 2
        p = model(train[0]).softmax(1).gather(1, train[1].unsqueeze(1)).flatten(1)
        misses += (1 - p).mean(1).detach() / 2
    assert torch.allclose(scores.values, (products * misses[:, None]).cpu(), rtol=1e-6, atol=1e-8)


def test_margins_and_their_gradients(problem) -> None:
    model, train, _ = problem

    def plain(output, target):
        p = output.softmax(1).gather(1, target.unsqueeze(1))
        return (p / (1 - p)).log().sum()

    margin = Margin(nn.CrossEntropyLoss())
    assert torch.allclose(margin(model(train[0]), train[1]), plain(model(train[0]), train[1]))
    wanted, found = gradients(model, train, plain), gradients(model, train, margin)
    assert torch.allclose(found, wanted, rtol=1e-8, atol=1e-10)
    ignored = torch.full_like(train[1], -100)
    assert margin(model(train[0]), ignored) == 0


@pytest.mark.parametrize("size", [1.0, 15.0, 16.5, 17.0, 30.0, 1e4])
def test_margins_of_certain_answers(size: float) -> None:
    """In single precision, their ``1 - p`` is rounded, and zero from 17 on."""
    logits, right = torch.tensor([[size, 0.0, 0.0]], dtype=torch.float32), torch.tensor([0])
    ways = {
        Margin(nn.CrossEntropyLoss()): (logits, right),
        Margin(nn.NLLLoss()): (logits, right),
        Margin(CausalLMLoss()): (logits.unsqueeze(1).expand(1, 2, 3), right.expand(1, 2)),
    }
    for margin, (given, target) in ways.items():
        output = given.clone().requires_grad_()
        value = margin(output, target)
        value.backward()
        assert value.item() == pytest.approx(size - math.log(2), rel=1e-6)
        assert output.grad is not None
        slope = torch.tensor([1.0, -0.5, -0.5], dtype=torch.float32)
        assert torch.allclose(output.grad.reshape(-1, 3)[0], slope, rtol=1e-6)
    margin = Margin(nn.BCEWithLogitsLoss())
    assert float(margin(logits, torch.tensor([[1.0, 0.0, 0.0]]))) == size
    masked = torch.tensor([[size, -torch.inf, -torch.inf]])
    assert float(Margin(nn.CrossEntropyLoss())(masked, right)) == 0.0


class Likelihood(nn.Module):
    """``-log p`` of the right answers, as a module of a user."""

    reduction = "sum"

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction=self.reduction)


def test_margins_that_are_not_numbers() -> None:
    """An answer that is certain shows no margin there; NaN does not mean that."""
    margin, right = Margin(Likelihood()), torch.tensor([0])
    assert margin(torch.tensor([[1e4, 0.0]]), right) == 0
    assert margin(torch.tensor([[math.nan, 0.0]]), right).isnan()


def test_trak_of_a_model_that_is_certain() -> None:
    """In single precision as in double, though 1 - p is rounded to zero for most samples."""
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(30, 6)
    with torch.no_grad():
        model[2].weight *= 60
        y = model(x).argmax(1)
        assert (nn.functional.cross_entropy(model(x).float(), y, reduction="none") == 0).any()
    found = []
    for dtype in (torch.float32, torch.float64):
        data = [(x.to(dtype), y)]
        scores = influence(
            model.to(dtype), nn.CrossEntropyLoss(), data, data, TRAK(8, damping=0.1), progress=False
        )
        found.append(scores.values.double())
    assert torch.allclose(*found, rtol=1e-2, atol=1e-4 * float(found[1].abs().max()))
    assert all(float(column.abs().max()) > 0 for column in found[1].T)


@pytest.mark.parametrize("method", [LoGra(16), TRAK(16, damping=0.1)])
def test_scores_under_autocast_are_rounded_like_gradients(method: Any) -> None:
    """Second moments in half precision have no small eigenvalues, and scores would miss by half."""
    model = mlp().float()
    data = [(x.float(), y) for x, y in loader(vectors(40), 20)]
    wanted = influence(model, nn.CrossEntropyLoss(), data, data, method).values
    with torch.autocast(model[0].weight.device.type, torch.bfloat16):
        found = influence(model, nn.CrossEntropyLoss(), data, data, method).values
    assert torch.dist(found, wanted) < 0.05 * wanted.norm()


def test_trak_adds_margins_of_tokens() -> None:
    """A text is a row of answers, whether the loss shifts the targets or the user does."""
    model, (x, _) = Words(nn.Embedding(7, 4), nn.Linear(4, 7)), tokens(5)
    labels = torch.randint(0, 7, x.shape)
    whole, own = [(x, labels)], [(x[:, :-1], labels[:, 1:])]
    method = TRAK(6, damping=0.1)
    first = influence(model, CausalLMLoss(), whole, whole, method, progress=False)
    model.has_classes_first = True
    second = influence(model, nn.CrossEntropyLoss(), own, own, method, progress=False)
    assert torch.allclose(first.values, second.values, rtol=1e-8)


class Words(nn.Sequential):
    has_classes_first = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        return logits.mT if self.has_classes_first else logits


@pytest.mark.parametrize("lossfunc", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()])
def test_trak_needs_right_answers(lossfunc) -> None:
    x, _ = vectors(4)
    model = mlp()
    soft = [(x, model(x).detach().softmax(1))]
    with pytest.raises(UsageError, match="these targets are probabilities"):
        influence(model, lossfunc, soft, soft, "trak", progress=False)


def test_trak_of_an_empty_batch(problem) -> None:
    model, train, queries = problem
    lossfunc, data = nn.CrossEntropyLoss(), loader(train, 9)
    wanted = influence(model, lossfunc, data, loader(queries, 3), TRAK(4, damping=0.1)).values
    more = [*data, tuple(part[:0] for part in train)]
    found = influence(model, lossfunc, more, loader(queries, 3), TRAK(4, damping=0.1)).values
    assert torch.equal(found, wanted)


def test_margins_in_half_precision_are_a_sum() -> None:
    """Their sum over a batch is rounded, and so are those over its halves."""
    model, lossfunc, (x, y) = mlp().bfloat16(), nn.CrossEntropyLoss(), vectors(9, seed=16)
    half = [(x.bfloat16(), y)]
    influence(model, lossfunc, half, half, TRAK(4, damping=0.1))


def test_what_is_singular_has_a_pseudo_inverse() -> None:
    rows = torch.randn(3, 8)
    found = inverse_product(rows.T @ rows, rows, 0.0)
    assert torch.allclose(found, rows @ torch.linalg.pinv(rows.T @ rows), atol=1e-8)


def test_refusals() -> None:
    data = loader(vectors(4), 2)
    with pytest.raises(UsageError, match="kind must be one of"):
        LoGra(kind="normal")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="dim must be a positive"):
        TRAK(0)
    with pytest.raises(UsageError, match="TRAK takes margins of a cross-entropy"):
        influence(mlp(), lambda o, t: o.square().sum(), data, data, "trak")
    for method in (LoGra, TRAK):
        for damping in (-0.1, "large", float("nan")):
            with pytest.raises(UsageError, match="a number that is zero or positive"):
                method(damping=damping)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"A checkpoint must be a state.* Got Sequential"):
        TRAK(checkpoints=[mlp()])  # type: ignore[list-item]
    others = (
        nn.MSELoss(),
        nn.CrossEntropyLoss(torch.ones(3)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    )
    for lossfunc in others:  # their values are not -log p
        with pytest.raises(UsageError, match="TRAK takes margins of a cross-entropy"):
            influence(mlp(), lossfunc, data, data, "trak")


def test_what_a_projection_cancels_has_no_part(tmp_path) -> None:
    """Gradients of a last layer add up to zero over classes, and equal signs leave their rounding.

    That would count as much as any other parameter, since each is divided by its own size.
    """
    torch.manual_seed(0)
    model, lossfunc = (
        nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss(),
    )
    train, queries = loader(vectors(9), 4), loader(vectors(3, seed=2), 2)
    projection = Projection(4, seed=3)
    cancelled = project(model, lossfunc, train, projection)["2.weight"]
    assert cancelled.norm() < 1e-12
    with pytest.warns(RangeWarning, match=r"2\.weight.* no part in the scores"):
        found = influence(model, lossfunc, train, queries, LoGra(4, seed=3))
    store = fill(
        GradientStore(tmp_path / "store", torch.float64), model, lossfunc, train, projection
    )
    with pytest.warns(RangeWarning, match=r"2\.weight.* no part in the scores"):
        asked = preconditioned(store, project(model, lossfunc, queries, projection))
    stored = store.scores(asked)
    model[2].weight.requires_grad_(False)
    wanted = influence(model, lossfunc, train, queries, LoGra(4, seed=3))
    assert torch.allclose(found.values, wanted.values, rtol=1e-9)
    assert torch.allclose(stored.values, wanted.values, rtol=1e-9)


@pytest.mark.parametrize("size", [1.0, 1e5, 1e7])
def test_small_gradients_beside_large_ones(size: float) -> None:
    """Those of layers behind features of 10⁷ look like rounding in single precision."""
    torch.manual_seed(0)
    model, x, y = mlp().float(), size * vectors(9)[0].float(), vectors(9)[1]
    with torch.no_grad():
        model[0].weight /= size
    arguments: Any = (nn.CrossEntropyLoss(), [(x, y)], [(x, y)], LoGra(9, damping=0.1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", RangeWarning)
        found = influence(model, *arguments).values
    exact = influence(model.double(), arguments[0], *[[(x.double(), y)]] * 2, arguments[3]).values
    is_right = torch.allclose(found.double(), exact, rtol=1e-2, atol=1e-3)
    assert is_right == (size < 1e7)
    assert is_right or any("2.weight" in str(warning.message) for warning in seen)


def test_an_empty_store_has_no_moments(tmp_path) -> None:
    model, queries = mlp(), loader(vectors(3), 2)
    store = GradientStore(tmp_path / "store")
    asked = project(model, nn.CrossEntropyLoss(), queries, Projection(4))
    store.append([], {name: rows[:0] for name, rows in asked.items()})
    with pytest.raises(UsageError, match="has no rows yet"):
        preconditioned(store, asked)


def test_autocast_does_not_round_what_is_stored(tmp_path) -> None:
    """It may still be on where queries have just been computed."""
    store = GradientStore(tmp_path / "store")
    with store:
        store.append(range(20), {"a": torch.randn(20, 8), "b": torch.randn(20, 4)})
    queries = {"a": torch.randn(3, 8).float(), "b": torch.randn(3, 4).float()}

    def found() -> list[torch.Tensor]:
        solved = preconditioned(store, queries)
        values = [store.scores(queries, cosine=cosine).values for cosine in (False, True)]
        return [*values, store.search(queries, 3).values, *solved.values()]

    wanted = found()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = found()
    assert all(map(torch.equal, rounded, wanted))
