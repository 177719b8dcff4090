"""Scores and stores of single tokens, against autograd of the loss at one position."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_attribution import (
    GradientStore,
    Influence,
    TracIn,
    fill,
    forms,
    influence,
    project,
    self_influence,
)
from backpack_core.errors import ShapeError, UnsupportedError, UsageError
from backpack_firstorder import Projection
from tests.attribution.problems import gradients, loader, mlp, tied, tokens, vectors

SAMPLES, TOKENS = 5, 5
NAMES = [f"{n}:{t}" for n in range(SAMPLES) for t in range(TOKENS)]


class Pooled(nn.Module):
    """A layer of positions, and one behind their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.first(x).tanh().sum(1))


def by_token(model, data):
    """Positions do not meet in the model: a token's gradient is that of the loss there."""
    parts = [gradients(model, tuple(d[:, t : t + 1] for d in data)) for t in range(TOKENS)]
    return torch.stack(parts, 1).flatten(0, 1)


@pytest.mark.parametrize("method", ["dot", "cosine", "tracin"])
def test_tokens_have_scores_of_their_own(method) -> None:
    model, lossfunc, train, asked = tied(), nn.CrossEntropyLoss(), tokens(SAMPLES), tokens(3, 2)
    g, q = by_token(model, train), gradients(model, asked)
    made = TracIn([model.state_dict()], [0.5]) if method == "tracin" else method
    scores = influence(
        model, lossfunc, loader(train, 3), loader(asked, 2), made, per="token", progress=False
    )
    if method == "cosine":
        g, q = nn.functional.normalize(g), nn.functional.normalize(q)
    wanted = g @ q.T * (0.5 if method == "tracin" else 1)
    assert scores.train == NAMES
    assert torch.allclose(scores.values, wanted.cpu(), rtol=1e-12, atol=1e-12)
    assert scores.sorted().train == NAMES


def test_scores_of_tokens_add_up() -> None:
    model, lossfunc, train, asked = tied(), nn.CrossEntropyLoss(), tokens(SAMPLES), tokens(3, 2)
    data = loader(train, 3), loader(asked, 2)
    torch.manual_seed(0)
    whole = influence(model, lossfunc, *data, "ekfac", progress=False)
    torch.manual_seed(0)
    each = influence(model, lossfunc, *data, "ekfac", per="token", progress=False)
    assert torch.allclose(each.values.unflatten(0, (SAMPLES, TOKENS)).sum(1), whole.values)


@pytest.mark.parametrize("method", ["dot", "cosine", "ekfac"])
@pytest.mark.parametrize("budget", [None, 256], ids=["whole", "in-parts"])
def test_tokens_have_an_influence_on_themselves(method, budget, monkeypatch) -> None:
    model, lossfunc, train = tied(), nn.CrossEntropyLoss(), tokens(SAMPLES)
    if budget is not None:  # of some tokens at a time
        monkeypatch.setattr(forms, "memory_budget", lambda: budget)
    # Positions do not meet in the model: tokens are samples of length one.
    single = loader(tuple(part.flatten()[:, None] for part in train), 4)

    def scores(data, **options):
        made = method
        if method == "ekfac":
            made = Influence(mc_samples=None, curvature_loader=loader(train, 3))
        return self_influence(model, lossfunc, data, made, progress=False, **options)

    found, wanted = scores(loader(train, 3), per="token"), scores(single)
    assert found.train == NAMES
    assert found.queries == ["itself"]
    assert (wanted.values > 0).all()
    assert torch.allclose(found.values, wanted.values, rtol=1e-9)


@pytest.mark.parametrize("projection", [None, Projection(5)])
def test_a_store_of_tokens(projection, tmp_path) -> None:
    model, lossfunc, train = tied(), nn.CrossEntropyLoss(), loader(tokens(SAMPLES), 3)
    samples, each = (GradientStore(tmp_path / n, torch.float64) for n in ("samples", "tokens"))
    fill(samples, model, lossfunc, train, projection)
    whole = fill(each, model, lossfunc, train, projection, per="token")
    assert whole.identities == NAMES
    for name, rows in samples[[*range(SAMPLES)]].items():
        rows = rows if isinstance(rows, torch.Tensor) else rows.dense()
        found = whole[NAMES][name]
        found = found if isinstance(found, torch.Tensor) else found.dense()
        assert torch.allclose(found.unflatten(0, (SAMPLES, TOKENS)).sum(1), rows)
    part = GradientStore(tmp_path / "part", torch.float64)
    with part:  # as if killed after one sample
        part.append(NAMES[:TOKENS], whole[NAMES[:TOKENS]])
    assert fill(part, model, lossfunc, train, projection, per="token").identities == NAMES
    with pytest.raises(UsageError, match="is a token, but a row for each sample was asked for"):
        fill(whole, model, lossfunc, train, projection)
    with pytest.raises(UsageError, match="is a sample, but a row for each token"):
        fill(GradientStore(samples.folder), model, lossfunc, train, projection, per="token")
    if projection is not None:
        asked = project(model, lossfunc, loader(tokens(2, 3), 2), projection)
        assert whole.search(asked, 1).identities[0][0] in NAMES


def test_refusals_of_tokens(tmp_path) -> None:
    lossfunc, data = nn.CrossEntropyLoss(), loader(vectors(4), 2)
    for method in ("trak", "logra"):
        with pytest.raises(UnsupportedError, match=f"{method} scores whole samples"):
            influence(mlp(), lossfunc, data, data, method, per="token")
    with pytest.raises(UnsupportedError, match="logra scores whole samples"):
        self_influence(mlp(), lossfunc, data, "logra", per="token")
    with pytest.raises(UsageError, match="per must be one of"):
        influence(mlp(), lossfunc, data, data, "dot", per="word")
    x, y = torch.randn(4, 6, 2), torch.randint(2, (4,))
    for method in ("dot", "cosine"):
        with pytest.raises(UnsupportedError, match="sums over parameters"):
            influence(Pooled(), lossfunc, [(x, y)], [(x, y)], method, per="token")
        with pytest.raises(UnsupportedError, match="sums over parameters"):
            self_influence(Pooled(), lossfunc, [(x, y)], method, per="token")
    with pytest.raises(ShapeError, match=r"gradients of \[4, 24\] tokens for 4 samples"):
        fill(GradientStore(tmp_path / "s"), Pooled(), lossfunc, [(x, y)], per="token")
