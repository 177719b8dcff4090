"""Stores that are filled from a loader, and asked as influence functions do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from backpack_attribution import (
    FaissIndex,
    GradientStore,
    LoGra,
    fill,
    influence,
    merge_stores,
    preconditioned,
    project,
)
from backpack_attribution.problem import Problem
from backpack_core.errors import ShapeError, UsageError
from backpack_firstorder import Projection
from tests.attribution.problems import loader, mlp, tied, tokens, vectors

NETS = {"mlp": (mlp, vectors), "tied": (tied, tokens)}


@pytest.fixture(params=NETS)
def problem(request):
    net, data = NETS[request.param]
    return net(), loader(data(9), 4), loader(data(3, seed=2), 2)


def test_searches_are_the_scores_of_methods(problem, tmp_path) -> None:
    model, train, queries = problem
    lossfunc, projection = nn.CrossEntropyLoss(), Projection(5, "gaussian", 1)
    store = GradientStore(tmp_path / "store", dtype=torch.float64)
    fill(store, model, lossfunc, train, projection)
    asked = project(model, lossfunc, queries, projection)
    wanted = influence(model, lossfunc, train, queries, LoGra(5, "gaussian", 1))
    found = store.scores(preconditioned(store, asked))
    assert found.train == wanted.train
    assert torch.allclose(found.values, wanted.values, rtol=1e-8, atol=1e-10)
    whole = fill(GradientStore(tmp_path / "whole", dtype=torch.float64), model, lossfunc, train)
    again = fill(GradientStore(tmp_path / "asked", dtype=torch.float64), model, lossfunc, queries)
    for method, cosine in (("dot", False), ("cosine", True)):
        wanted = influence(model, lossfunc, train, queries, method)
        found = whole.scores(again[again.identities], cosine=cosine)
        assert torch.allclose(found.values, wanted.values, rtol=1e-10, atol=1e-12)


def test_what_is_stored_is_not_computed_again(problem, tmp_path) -> None:
    model, train, _ = problem
    lossfunc, projection = nn.CrossEntropyLoss(), Projection(5)
    whole = fill(GradientStore(tmp_path / "whole"), model, lossfunc, train, projection)
    with GradientStore(tmp_path / "store") as store:  # as if killed after five samples
        kept = [0, 1, 2, 3, 5]
        store.append(kept, whole[kept])
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    fill(store, model, lossfunc, train, projection)
    handle.remove()
    # The first batch is done, and the second runs twice: is the model random?
    assert len(calls) == 3
    assert store.identities == [*kept, 4, 6, 7, 8]
    for name, value in whole[[*range(9)]].items():
        assert torch.equal(value, store[[*range(9)]][name])
    with pytest.raises(UsageError, match="8 identities for 9 samples"):
        fill(store, model, lossfunc, train, projection, identities=[*"abcdefgh"])


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, shift, x):
        return self.layer(x + shift)


def test_a_first_tensor_without_samples_is_refused(tmp_path) -> None:
    """Its length is taken for that of the batch, and all other samples would be lost."""
    x, y = vectors(4)
    batch = {"shift": torch.ones(1, 5), "x": x, "labels": y}
    store = GradientStore(tmp_path / "store")
    with pytest.raises(
        ShapeError, match=r"has 1 entries, but the gradients are those of \[4\] samples"
    ):
        fill(store, _Shifted(), nn.CrossEntropyLoss(), [batch])
    turned = {"x": x, "shift": torch.ones(1, 5), "labels": y}
    assert len(fill(store, _Shifted(), nn.CrossEntropyLoss(), [turned])) == 4


@pytest.mark.parametrize("other", [Projection(4, seed=1), Projection(4, "gaussian"), None])
def test_queries_of_another_projection_are_refused(other, tmp_path) -> None:
    model, lossfunc, projection = mlp(), nn.CrossEntropyLoss(), Projection(4)
    train, queries = loader(vectors(6), 3), loader(vectors(2, seed=2), 2)
    store = fill(GradientStore(tmp_path / "store"), model, lossfunc, train, projection)
    own = project(model, lossfunc, queries, projection)
    if other is None:  # rows of a store have the projection, too
        elsewhere = GradientStore(tmp_path / "other")
        fill(elsewhere, model, lossfunc, queries, Projection(4, seed=2))
        asked = elsewhere[[0, 1]]
    else:
        asked = project(model, lossfunc, queries, other)
    assert store.search(preconditioned(store, own), k=1).values.shape == (2, 1)
    for ask in (store.search, store.scores, lambda q: preconditioned(store, q)):
        with pytest.raises(UsageError, match="have one projection"):
            ask(asked)
    with pytest.raises(UsageError, match="have one projection"):
        fill(store, model, lossfunc, train, other)


def test_an_index_refuses_queries_of_another_projection(tmp_path) -> None:
    pytest.importorskip("faiss", reason="the extra for faster search is not installed")
    model, lossfunc, projection = mlp(), nn.CrossEntropyLoss(), Projection(4)
    train, queries = loader(vectors(6), 3), loader(vectors(2, seed=2), 2)
    index = FaissIndex(fill(GradientStore(tmp_path), model, lossfunc, train, projection))
    own = project(model, lossfunc, queries, projection)
    assert index.search(own, k=1).values.shape == (2, 1)
    with pytest.raises(UsageError, match="have one projection"):
        index.search(project(model, lossfunc, queries, Projection(4, seed=1)), k=1)


def test_a_full_store_of_another_model_is_refused(tmp_path) -> None:
    lossfunc, train = nn.CrossEntropyLoss(), loader(vectors(6), 3)
    for number, projection in enumerate((None, Projection(4))):
        store = fill(GradientStore(tmp_path / f"{number}"), mlp(), lossfunc, train, projection)
        with pytest.raises(ShapeError, match="One store is for one model"):
            fill(store, nn.Sequential(mlp()), lossfunc, train, projection)
        frozen = mlp()
        next(frozen.parameters()).requires_grad_(False)
        with pytest.raises(ShapeError, match="One store is for one model"):
            fill(store, frozen, lossfunc, train, projection)
        fill(store, mlp(), lossfunc, train, projection)


def test_rows_are_of_one_set_of_weights(problem, tmp_path) -> None:
    """Trained on, a model neither adds rows nor asks for them; half precision is no other."""
    model, train, queries = problem
    lossfunc, projection = nn.CrossEntropyLoss(), Projection(5)
    store = fill(GradientStore(tmp_path / "store"), model, lossfunc, train[:1], projection)
    half = Problem(copy.deepcopy(model).bfloat16(), lossfunc)
    assert half.weights() == Problem(model, lossfunc).weights()
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    asked = project(model, lossfunc, queries, projection)
    for call in (
        lambda: fill(GradientStore(tmp_path / "store"), model, lossfunc, train, projection),
        lambda: store.search(asked, 2),
        lambda: preconditioned(store, asked),
    ):
        with pytest.raises(UsageError, match="at other weights"):
            call()
    fill(GradientStore(tmp_path / "other"), model, lossfunc, train[1:], projection)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept[name])
    fill(store, model, lossfunc, train, projection)
    assert len(store) == 9
    with pytest.raises(UsageError, match="at different weights"):
        merge_stores([tmp_path / "store", tmp_path / "other"], tmp_path / "both")
    with pytest.raises(UsageError, match="a list of folders"):
        merge_stores(str(tmp_path / "store"), tmp_path / "both")
    assert len(store.search(project(model, lossfunc, queries, projection), 2).identities) == 3


def test_queries_that_are_no_mapping(problem, tmp_path) -> None:
    model, train, _ = problem
    store = fill(GradientStore(tmp_path / "store"), model, nn.CrossEntropyLoss(), train)
    with pytest.raises(UsageError, match="Queries must be"):
        store.search(torch.ones(2, 5), 1)


def test_identities_that_are_misspelt(problem, tmp_path) -> None:
    model, train, _ = problem
    store = GradientStore(tmp_path / "store")
    with pytest.raises(UsageError, match="Got 'contnt'"):
        fill(store, model, nn.CrossEntropyLoss(), train, identities="contnt")
