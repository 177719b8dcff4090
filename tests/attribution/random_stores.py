"""Stores and scores that are drawn, against gradients of each sample by autograd.

A store is filled in several sessions. They stop at any moment, and the model, the loss or the
settings may be others in between, which must be refused.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from backpack_attribution import (
    GradientStore,
    Influence,
    LoGra,
    TracIn,
    fill,
    influence,
    merge_stores,
    preconditioned,
    project,
    self_influence,
)
from backpack_attribution.forms import dense
from backpack_attribution.identities import ByContent
from backpack_core.errors import BackpackError, UsageError
from backpack_firstorder import Projection, SampleGradients
from tests.attribution.problems import ggn, gradients, mlp, tied, tokens, vectors


class Words(nn.Module):
    """Tables of several widths, one of them with one column, and a layer behind a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Embedding(7, 3), nn.Embedding(7, 1)
        self.head = nn.Linear(3, 3)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.head((self.table(words) + self.bias(words)).mean(1).tanh())
        return result


def _of_words(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(7, (samples, 4), generator=generator)
    return x, torch.randint(3, (samples,), generator=generator)


def _words() -> nn.Module:
    torch.manual_seed(0)
    return Words()


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "vectors": (mlp, vectors),
    "tokens": (tied, tokens),
    "words": (_words, _of_words),
}


BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Stopped(Exception):
    """What a session is stopped by."""


class Stopping:
    """Batches, up to one that cannot be read in a later pass over them."""

    def __init__(self, batches: list[Any], after: int) -> None:
        self.batches, self.after, self.passes = batches, after, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for place, batch in enumerate(self.batches):
            if self.passes > 1 and place == self.after:
                raise Stopped
            yield batch


class History:
    """A store, its sessions, and what it should hold.

    Attributes:
        random: What is drawn from.
        told: What was drawn.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.random, self.folder, self.told = Random(seed), folder, list[Any]([seed])
        draw = self.random
        kind = draw.choice([*PROBLEMS])
        make, data = PROBLEMS[kind]
        self.model, self.samples = make(), draw.choice([1, 3, 5, 8])
        for parameter in [*self.model.parameters()][1:]:
            parameter.requires_grad_(draw.random() < 0.85)
        self.data, self.asked = data(self.samples), data(draw.choice([1, 3]), 9)
        self.dtype = draw.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
        kinds: Any = draw.choice(["kronecker", "sparse", "rademacher"])
        self.projection = draw.choice([None, Projection(draw.choice([4, 9]), kinds, seed)])
        self.rank = draw.choice([None, None, 2]) if self.projection is None else None
        self.names = draw.choice(["place", "content"])
        self.lossfunc = nn.CrossEntropyLoss(reduction=draw.choice(["mean", "sum"]))
        self.told += [kind, self.samples, self.dtype, self.projection, self.rank, self.names]
        self.told.append([n for n, p in self.model.named_parameters() if not p.requires_grad])

    # Data ----------------------------------------------------------------------------------------

    def loader(self, data: tuple[Tensor, Tensor], part: slice = slice(None)) -> list[Any]:
        size = self.random.randint(1, len(data[0]))
        return [*zip(*(t[part].split(size) for t in data), strict=True)]

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Flat gradients ``[N, P]``, by parameter, ``[N, *θ]``."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        parts = rows.split([p.numel() for p in trained.values()], 1)
        return {
            name: part.reshape(len(rows), *p.shape)
            for (name, p), part in zip(trained.items(), parts, strict=True)
        }

    def truth(self, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """What a row should hold, by part."""
        found = self.named(gradients(self.model, data))
        if self.projection is None:
            return found
        return {
            name: SampleGradients.from_dense(rows).project(self.projection, name)
            for name, rows in found.items()
        }

    # Sessions ------------------------------------------------------------------------------------

    def store(self, folder: str = "store", **options: Any) -> GradientStore:
        options.setdefault("shard_bytes", self.random.choice([1, 500, 2**20]))
        return GradientStore(self.folder / folder, self.dtype, self.rank, **options)

    def fill(self, store: GradientStore, loader: Any, **options: Any) -> None:
        options = {"identities": self.names, "progress": False, **options}
        model, lossfunc = options.pop("model", self.model), options.pop("lossfunc", self.lossfunc)
        projection = options.pop("projection", self.projection)
        fill(store, model, lossfunc, loader, projection, **options)

    def session(self) -> None:
        """Rows are added, until something happens."""
        loader = self.loader(self.data)
        after = self.random.randint(0, len(loader))
        self.told.append(f"stopped after {after}")
        with contextlib.suppress(Stopped):
            self.fill(self.store(process=self.random.choice([0, 1])), Stopping(loader, after))

    def killed(self) -> None:
        """A session whose last shard was not written, or was half written."""
        self.told.append("killed")
        store = self.store(shard_bytes=self.random.choice([1, 10**9]))
        loader = self.loader(self.data)
        flush = store.flush
        left = [self.random.randint(0, 3)]

        def failing() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Stopped
            flush()

        store.flush = failing  # type: ignore[method-assign]
        with contextlib.suppress(Stopped):
            self.fill(store, loader)

    def refused(self) -> str:
        """Something else that must not be mixed with the rows."""
        if not len(self.store()):
            return ""
        model, projection, lossfunc = copy.deepcopy(self.model), self.projection, self.lossfunc
        kind = self.random.choice(["weights", "frozen", "projection", "loss", "tied", "per"])
        self.told.append(f"other {kind}")
        options: dict[str, Any] = {}
        trained = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            if kind == "weights":
                next(model.parameters()).mul_(1.05)
            elif kind == "frozen":
                trained[0].requires_grad_(False)
                if len(trained) == 1:
                    return ""
            elif kind == "tied":
                model.add_module("more", nn.Linear(1, 1))
            elif kind == "projection":
                projection = Projection(4, seed=77) if projection is None else None
            elif kind == "loss":
                lossfunc = nn.CrossEntropyLoss(ignore_index=2)
            else:
                options["per"] = "token"
        options |= {"model": model, "lossfunc": lossfunc, "projection": projection}
        try:
            self.fill(self.store(), self.loader(self.data), **options)
        except BackpackError:
            return ""
        return "it was not refused"

    # Comparisons ---------------------------------------------------------------------------------

    def compare(self) -> str:
        """The rows, in any order, and what is computed from them."""
        store, right = self.store(), self.truth(self.data)
        names: list[Any] = [*range(self.samples)]
        if self.names == "content":
            names = ByContent()(self.data, self.samples)
        if {*store.identities} != {*names}:
            return f"it has {store.identities} instead of {names}"
        order = self.random.sample(range(self.samples), self.samples)
        rows = {part: dense(value) for part, value in store[[names[n] for n in order]].items()}
        if rows.keys() != right.keys():
            return f"parts are {[*rows]}"
        for part, found in rows.items():
            if self.rank is None and not self._close(found, right[part][order]):
                return f"the rows of {part} are wrong"
        return self._compare_scores(store, names)

    def _compare_scores(self, store: GradientStore, names: list[Any]) -> str:
        asked: Any = self.truth(self.asked)
        if self.projection is not None:
            made = project(self.model, self.lossfunc, self.loader(self.asked), self.projection)
            for part, rows in asked.items():
                if not torch.allclose(made[part], rows, rtol=1e-9, atol=1e-10):
                    return f"the queries of {part} are projected otherwise"
            asked = made
        if self.random.random() < 0.3 and all(value[0].numel() < 200 for value in asked.values()):
            asked = preconditioned(store, asked)
        stored = {part: dense(value).double() for part, value in store[names].items()}
        right = sum(stored[n].flatten(1) @ asked[n].double().flatten(1).T for n in asked)
        scores = store.scores(asked)
        places = [scores.train.index(name) for name in names]
        if not self._close(scores.values[places], right):
            return "scores are wrong"
        k = self.random.randint(1, self.samples + 1)
        best = store.search(asked, k, rows=self.random.choice([1, 2, 4096]))
        wanted = right.T.topk(min(k, self.samples), 1).values
        return "" if self._close(best.values, wanted) else "the search is wrong"

    def merge(self) -> str:
        """Two stores of halves of the data, as one."""
        for number, part in enumerate(slice(n, None, 2) for n in (0, 1)):
            names = [*range(self.samples)][part]
            if names:
                self.fill(
                    self.store(f"part {number}"), self.loader(self.data, part), identities=names
                )
        folders = [
            self.folder / f"part {n}" for n in range(2) if (self.folder / f"part {n}").exists()
        ]
        merge_stores(folders, self.folder / "merged")
        found, right = self.store("merged"), self.truth(self.data)
        for part, rows in found[[*range(self.samples)]].items():
            if self.rank is None and not self._close(dense(rows), right[part]):
                return f"the merged rows of {part} are wrong"
        return ""

    def score(self) -> str:
        """Scores without a store."""
        train, asked = gradients(self.model, self.data), gradients(self.model, self.asked)
        kind = self.random.choice(["dot", "cosine", "tracin", "logra", "cg", "self", "token"])
        self.told.append(f"scores by {kind}")
        products = train @ asked.T
        options: dict[str, Any] = {"progress": False}
        method: Any = kind
        if kind == "cosine":
            products = products / torch.outer(train.norm(dim=1), asked.norm(dim=1))
        elif kind == "tracin":
            before = copy.deepcopy(self.model.state_dict())
            other = {name: value * 1.1 for name, value in before.items()}
            self.model.load_state_dict(other)
            more = gradients(self.model, self.data) @ gradients(self.model, self.asked).T
            self.model.load_state_dict(before)
            products, method = 0.5 * products + 2.0 * more, TracIn([before, other], [0.5, 2.0])
        elif kind == "logra":
            method = LoGra(4, seed=3, damping=0.5)
            products = self._logra(train, asked, Projection(4, seed=3))
        elif kind == "cg":
            damping = self.random.choice([0.1, 1.0])
            scale = self.samples * (self.data[1][0].numel() if self.data[1].dim() > 1 else 1)
            scale = scale if self.lossfunc.reduction == "mean" else 1
            matrix = ggn(self.model, self.data) / scale + damping * torch.eye(train.shape[1])
            products = train @ torch.linalg.solve(matrix, asked.T) / scale
            method = Influence("kfac", damping, refine=200, rtol=1e-10, mc_samples=None)
        elif kind == "self":
            found = self_influence(
                self.model, self.lossfunc, self.loader(self.data), "dot", **options
            )
            right = train.square().sum(1, keepdim=True)
            return "" if torch.allclose(found.values, right) else "self-influence is wrong"
        elif kind == "token":
            method, options["per"] = "dot", "token"
        try:
            found = influence(
                self.model, self.lossfunc, self.loader(self.data), self.loader(self.asked),
                method, **options,
            )  # fmt: skip
        except UsageError as error:
            return f"{error}"
        except BackpackError:
            return "" if kind in ("token", "cg") else "it was refused"
        values = found.values
        if kind == "token":
            values = values.reshape(self.samples, -1, values.shape[1]).sum(1)
        is_alike = torch.allclose(values, products, rtol=1e-5, atol=1e-7)
        return "" if is_alike else "scores differ"

    def _logra(self, train: Tensor, asked: Tensor, projection: Projection) -> Tensor:
        total, named = torch.zeros(()), (self.named(train), self.named(asked))
        for name in named[0]:
            left, right = (
                SampleGradients.from_dense(g[name]).project(projection, name) for g in named
            )
            moments = left.T @ left
            if moments.trace() < 1e-20 * train.square().sum():
                continue  # a projection that cancels them all
            damped = moments + 0.5 * torch.linalg.eigvalsh(moments).mean() * torch.eye(4)
            total = total + left @ torch.linalg.pinv(damped, hermitian=True) @ right.T
        return total

    def _close(self, ours: Tensor, right: Tensor) -> bool:
        size = float(right.abs().max()) if right.numel() else 0.0
        return ours.shape == right.shape and bool(
            ((ours.double() - right).abs() <= BOUNDS[self.dtype] * (1e-3 + size)).all()
        )


def fault_of(seed: int, folder: Path) -> str:
    """What is wrong in a history."""
    history = History(seed, folder)
    draw = history.random
    for _ in range(draw.randint(1, 4)):
        fault = draw.choice([history.session, history.session, history.killed, history.refused])()
        if fault:
            return f"{history.told}: {fault}"
    history.fill(history.store(), history.loader(history.data))
    for look in (history.compare, history.merge, history.score):
        if fault := look():
            return f"{history.told}: {look.__name__}: {fault}"
    return ""
