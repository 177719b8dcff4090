"""Rows, queries and checkpoints that do not belong together are refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backpack_attribution import TRAK, GradientStore, TracIn, fill, influence, project
from backpack_attribution.forms import dense
from backpack_attribution.identities import content_hashes
from backpack_core.errors import UsageError
from backpack_core.extensions import DiagGGNExact
from backpack_data import accumulate
from backpack_firstorder import Projection
from tests.attribution.problems import loader, mlp, vectors


def test_other_buffers_are_other_weights(tmp_path) -> None:
    """Statistics of a normalisation are a part of the function."""
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).eval()
    train = loader(vectors(6), 3)
    store = fill(GradientStore(tmp_path / "store"), model, nn.CrossEntropyLoss(), train[:1])
    model[1].get_buffer("running_mean").add_(1.0)
    with pytest.raises(UsageError, match="at other weights"):
        fill(store, model, nn.CrossEntropyLoss(), train)


class Named(nn.Module):
    """Two layers with names that are given in their order."""

    def __init__(self, first: nn.Module, last: nn.Module, names: tuple[str, str]) -> None:
        super().__init__()
        self.names = names
        for name, layer in zip(names, (first, last), strict=True):
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        first, last = (self.get_submodule(name) for name in self.names)
        result: Tensor = last(first(x).tanh())
        return result


def test_exchanged_names_are_another_model(tmp_path) -> None:
    first, last = nn.Linear(5, 5), nn.Linear(5, 5)
    lossfunc, train = nn.CrossEntropyLoss(), loader(vectors(6), 3)
    one, other = Named(first, last, ("a", "b")), Named(first, last, ("b", "a"))
    store = fill(GradientStore(tmp_path / "store"), one, lossfunc, train[:1], Projection(4))
    with pytest.raises(UsageError, match="at other weights"):
        fill(store, other, lossfunc, train, Projection(4))
    with pytest.raises(UsageError, match="at other weights"):
        store.search(project(other, lossfunc, train, Projection(4)), 1)


@pytest.mark.parametrize(
    "other",
    [nn.CrossEntropyLoss(label_smoothing=0.5), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))],
    ids=["setting", "weights"],
)
def test_a_store_is_of_one_loss(other: nn.Module, tmp_path) -> None:
    """A mean and a sum are one loss: the samples' own losses count. Queries may have another."""
    model, train = mlp(), loader(vectors(6), 3)
    store = fill(GradientStore(tmp_path / "store"), model, nn.CrossEntropyLoss(), train[:1])
    with pytest.raises(UsageError, match="A store is of one loss"):
        fill(GradientStore(tmp_path / "store"), model, other, train)
    fill(store, model, nn.CrossEntropyLoss(reduction="sum").eval(), train)
    assert len(store) == 6


class Wrapped(nn.Module):
    """A loss that stores the word, but does not read it again."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction, self.each = reduction, nn.CrossEntropyLoss(reduction=reduction)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        result: Tensor = self.each(output, target)
        return result


def test_a_loss_that_only_says_that_it_sums_is_measured() -> None:
    model, train = mlp(), loader(vectors(6), 3)
    with pytest.raises(UsageError, match="is not the sum of its samples' losses"):
        influence(model, Wrapped("mean"), train, train, "dot")
    found = influence(model, Wrapped("sum"), train, train, "dot")
    wanted = influence(model, nn.CrossEntropyLoss(), train, train, "dot")
    assert torch.allclose(found.values, wanted.values)


def test_checkpoints_that_are_the_model_itself() -> None:
    model, train, kept = mlp(), loader(vectors(6), 3), list[Any]()
    for _ in range(2):
        kept.append(model.state_dict())
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    with pytest.raises(UsageError, match="Two checkpoints are the same tensors"):
        TracIn(kept)
    with pytest.raises(UsageError, match="Two checkpoints are the same tensors"):
        TRAK(4, kept)
    method = TracIn([copy.deepcopy(kept[0]), kept[1]])
    assert influence(model, nn.CrossEntropyLoss(), train, train, method).values.shape == (6, 6)


def test_identities_of_other_libraries(tmp_path) -> None:
    model, train = mlp(), loader(vectors(6), 3)
    store = fill(GradientStore(tmp_path / "store"), model, nn.CrossEntropyLoss(), train)
    for names in (np.array([0, 5, 7]), torch.tensor([0, 5, 7]), [0, 5, 7]):
        assert store.missing(names) == [2]
        for part, rows in store[names[:2]].items():
            assert torch.equal(dense(rows), dense(store[[0, 5]][part]))
    assert len(store[np.int64(3)]["0.bias"]) == 1


def test_searches_that_cannot_be_made(tmp_path) -> None:
    model, train = mlp(), loader(vectors(6), 3)
    store = fill(GradientStore(tmp_path / "store"), model, nn.CrossEntropyLoss(), train)
    queries = {name: torch.ones(1, *p.shape) for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=r"must be a positive integer\. Got 0"):
        store.search(queries, rows=0)
    queries["0.bias"][0, 0] = torch.nan
    with pytest.raises(UsageError, match="not finite"):
        store.search(queries)


def test_products_that_overflow_have_no_order(tmp_path) -> None:
    """Infinity minus infinity; NaN would be sorted as the largest."""
    with GradientStore(tmp_path / "store") as store:
        store.append([0, 1], {"a": torch.tensor([[1e25, -1e25], [1.0, 1.0]])})
    queries = {"a": torch.full((1, 2), 1e25, dtype=torch.float32)}
    with pytest.raises(UsageError, match="must be numbers, and some are NaN"):
        store.search(queries, 1)
    assert store.search(queries, 1, cosine=True).identities == [[1]]


def test_data_of_one_sample_with_a_stride(tmp_path) -> None:
    """Every second of two samples: memory of one entry is contiguous with any stride."""
    x, y = (part[::2] for part in vectors(2))
    assert y.stride() == (2,)
    found = influence(mlp(), nn.CrossEntropyLoss(), [(x, y)], [(x, y)], "dot", identities="content")
    assert found.train[0] == content_hashes((x.clone(), torch.tensor([int(y)])), 1)[0]
    state = tmp_path / "state"
    accumulate(mlp(), nn.CrossEntropyLoss(), [(x, y)], DiagGGNExact(), state_file=state)


def _moved(model: nn.Module) -> nn.Module:
    found = copy.deepcopy(model)
    with torch.no_grad():
        next(found.parameters()).add_(1.0)
    return found


@pytest.mark.parametrize("other", ["weights", "loss", "projection", "frozen", "per"])
def test_a_store_without_rows_accepts_other_ones(other: str, tmp_path, monkeypatch) -> None:
    model, lossfunc, train = mlp(), nn.CrossEntropyLoss(), loader(vectors(6), 3)
    with monkeypatch.context() as patched:  # a process that is killed writes no shard
        patched.setattr(GradientStore, "flush", lambda _: None)
        fill(GradientStore(tmp_path / "store"), model, lossfunc, train, Projection(4))
    assert GradientStore(tmp_path / "store").shapes
    options: dict[str, Any] = {"projection": Projection(4)}
    if other == "weights":
        model = _moved(model)
    elif other == "loss":
        lossfunc = nn.CrossEntropyLoss(label_smoothing=0.5)
    elif other == "projection":
        options = {}
    elif other == "frozen":
        next(model.parameters()).requires_grad_(False)
    else:
        options["per"] = "token"
    store = fill(GradientStore(tmp_path / "store"), model, lossfunc, train, **options)
    fresh = fill(GradientStore(tmp_path / "fresh"), model, lossfunc, train, **options)
    assert store.identities == fresh.identities
    for name, rows in store[store.identities].items():
        assert torch.equal(dense(rows), dense(fresh[store.identities][name]))
    with pytest.raises(UsageError, match="at other weights"):
        fill(GradientStore(tmp_path / "store"), _moved(model), lossfunc, train, **options)


def test_rows_of_two_models_that_begin_at_once(tmp_path) -> None:
    """The one that writes first has the store."""
    gradients = {"weight": torch.ones(1, 3)}
    first, second = (GradientStore(tmp_path / "store", process=n) for n in (0, 1))
    first.computed_by({}, weights="a")
    first.append(["a"], gradients)
    second.computed_by({}, weights="b")
    second.append(["b"], gradients)
    second.flush()
    with pytest.raises(UsageError, match="their weights differ"):
        first.flush()
    assert GradientStore(tmp_path / "store").identities == ["b"]
