"""Sums over data sets that are drawn, and what they should be, by plain autograd on one batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import backpack_core.extensions as known
from backpack_core import Extension, backpack, extend
from backpack_data import Quantities, accumulate, combined
from backpack_data.batches import output_of, split
from tests.data.drawn_models import PARTS, WITHOUT_FACTORS, Named, TwoLosses

ROWS: Final = ("BatchGrad", "BatchL2Grad", "BatchDiagGGNExact", "BatchDiagHessian")
SUMS: Final = ("SumGradSquared", "Variance", "DiagGGNExact", "DiagHessian", "ClippedSumGrad")
ROOTS: Final = ("SqrtGGNExact",)
FACTORS: Final = ("KFLR", "EKFAC")
PRODUCTS: Final = ("GradInner", "ProjectedGrad")
ALL: Final = (*ROWS, *SUMS, *ROOTS, *FACTORS, *PRODUCTS)
CLASSES: Final = 3
THRESHOLD: Final = 0.2


# Data --------------------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """Single samples, for a loader that collates."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


class Stopped(Exception):
    """What a run is stopped by."""


class Stopping:
    """Batches, up to one that cannot be read."""

    def __init__(self, batches: Any, after: int) -> None:
        self.batches, self.after = batches, after

    def __iter__(self) -> Iterator[Any]:
        for place, batch in enumerate(self.batches):
            if place == self.after:
                raise Stopped
            yield batch


# A sum -------------------------------------------------------------------------------------------


class Sum:
    """A data set, a model, a loss and extensions.

    Attributes:
        random: What is drawn from.
        told: What was drawn.
        parts: The names of the model's parts.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        torch.manual_seed(seed)
        draw = self.random
        self.size = draw.choice([3, 4])
        self.parts = [draw.choice([*PARTS]) for _ in range(draw.randint(0, 2))]
        self.form = draw.choice(["pair", "list", "tuple", "keywords", "labels"])
        body = nn.Sequential(
            *[PARTS[name](self.size) for name in self.parts], nn.Linear(self.size, CLASSES)
        )
        self.model = Named(body, self.form == "labels" and draw.random() < 0.5)
        for parameter in [*self.model.parameters()][:-1]:
            parameter.requires_grad_(draw.random() < 0.85)
        self.samples = draw.choice([1, 2, 3, 4, 5, 7])
        self.reduction = draw.choice(["mean", "sum"])
        self.kind = draw.choice(["classes", "weighted", "ignored", "smooth", "squares", "bits"])
        self.is_single = draw.random() < 0.15
        self.is_twofold = draw.random() < 0.2 and self.kind in ("classes", "ignored")
        self.x, self.shift = torch.randn(2, self.samples, self.size)
        self.make_target()
        self.sizes = self.draw_sizes()
        self.names = draw.sample(ALL, draw.randint(1, 4))
        if WITHOUT_FACTORS & {*self.parts}:
            self.names = [name for name in self.names if name not in FACTORS] or ["DiagGGNExact"]
        self.lossfunc = self.make_loss()
        if self.is_single:
            self.model.float()
            self.lossfunc.float()
            self.x, self.shift = self.x.float(), self.shift.float()
            if self.target.is_floating_point():
                self.target = self.target.float()
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.queries = {n: torch.randn(2, *p.shape, dtype=p.dtype) for n, p in trained.items()}
        self.told = [
            *(seed, self.parts, self.form, self.samples, self.sizes, self.kind, self.reduction),
            *(self.names, "single" if self.is_single else "double", f"twofold {self.is_twofold}"),
            f"frozen {[n for n, p in self.model.named_parameters() if not p.requires_grad]}",
        ]

    def draw_sizes(self) -> list[int]:
        left, sizes = self.samples, list[int]()
        most = self.random.choice([1, 2, 3, 4])
        while left:
            sizes.append(min(left, self.random.choice([most, self.random.randint(1, most)])))
            left -= sizes[-1]
        return sizes

    def make_target(self) -> None:
        if self.kind == "squares":
            self.target = torch.randn(self.samples, CLASSES)
        elif self.kind == "bits":
            self.target = torch.randint(2, (self.samples, CLASSES)).to(torch.get_default_dtype())
        else:
            self.target = torch.randint(CLASSES, (self.samples,))
            if self.kind == "ignored" and self.samples > 1:
                self.target[self.random.randrange(self.samples)] = -100

    def make_loss(self, reduction: str | None = None) -> nn.Module:
        reduction = reduction or self.reduction
        if self.kind == "squares":
            return nn.MSELoss(reduction=reduction)
        if self.kind == "bits":
            return nn.BCEWithLogitsLoss(reduction=reduction)
        weight = torch.tensor([0.5, 1.0, 2.0]) if self.kind == "weighted" else None
        smoothing = 0.2 if self.kind == "smooth" else 0.0
        made = nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=smoothing)
        if not self.is_twofold:
            return made
        return TwoLosses(made, nn.CrossEntropyLoss(reduction=reduction))

    def extensions(self) -> list[Extension]:
        arguments: dict[str, list[Any]] = {
            "ClippedSumGrad": [THRESHOLD],
            "GradInner": [self.queries],
            "ProjectedGrad": [4],
            "EKFAC": [None],
        }
        return [getattr(known, name)(*arguments.get(name, [])) for name in self.names]

    # Batches -------------------------------------------------------------------------------------

    def items(self) -> list[Any]:
        """The data in batches."""
        cuts = [t.split(self.sizes) for t in (self.x, self.shift, self.target)]
        return [self.formed(*parts) for parts in zip(*cuts, strict=True)]

    def formed(self, x: Tensor, shift: Tensor, target: Tensor) -> Any:
        if self.form == "pair":
            return x, target
        if self.form == "list":
            return [x, target]
        if self.form == "tuple":
            return (x, shift), target
        if self.form == "keywords":
            return {"shift": shift, "x": x}, target
        return {"x": x, "labels": target, "shift": shift}

    def loader(self) -> Any:
        """The data, as a list or by a loader."""
        kind = self.random.choice(["list", "loader", "loader"])
        self.told.append(kind)
        if kind == "list":
            return self.items()
        size = self.random.randint(1, self.samples)
        self.sizes = [len(part) for part in self.x.split(size)]
        self.told.append(self.sizes)
        singles = zip(self.x, self.shift, self.target, strict=True)
        return DataLoader(Samples([self.formed(*single) for single in singles]), size)

    # Ways ----------------------------------------------------------------------------------------

    def found(self, folder: Path) -> dict[tuple[str, str], Any]:
        """The sum, by a way that is drawn; by name of the parameter and of the extension."""
        way = self.random.choice([*WAYS])
        self.told.append(way)
        fields = {e.savefield: type(e).__name__ for e in self.extensions()}
        values = WAYS[way](self, folder)
        return {(path, fields[field]): value for (path, field), value in values.items()}

    def accumulated(self, loader: Any, **options: Any) -> Quantities:
        return accumulate(
            self.model, self.lossfunc, loader, *self.extensions(), progress=False, **options
        )


Way = Callable[[Sum, Path], Mapping[tuple[str, str], Any]]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


@way
def plain(given: Sum, folder: Path) -> Mapping[tuple[str, str], Any]:
    return given.accumulated(given.loader())


@way
def captured(given: Sum, folder: Path) -> Mapping[tuple[str, str], Any]:
    return given.accumulated(given.loader(), capture=True)


@way
def stopped(given: Sum, folder: Path) -> Mapping[tuple[str, str], Any]:
    """Stopped several times, and resumed; perhaps with other objects of the same kind."""
    loader, every = given.loader(), given.random.choice([1, 2])
    state = {"state_file": folder / "state", "every": every}
    state["capture"] = given.random.random() < 0.3
    for _ in range(given.random.randint(1, 3)):
        after = given.random.randint(0, len(loader))
        given.told.append(f"stopped at {after}")
        with contextlib.suppress(Stopped):
            given.accumulated(Stopping(loader, after), **state)
        if given.random.random() < 0.5:
            given.model, given.lossfunc = copy.deepcopy((given.model, given.lossfunc))
    return given.accumulated(loader, **state)


@way
def saved(given: Sum, folder: Path) -> Mapping[tuple[str, str], Any]:
    found = given.accumulated(given.loader())
    found.save(folder / "found")
    return Quantities.load(folder / "found")


@way
def in_parts(given: Sum, folder: Path) -> Mapping[tuple[str, str], Any]:
    """Micro-batches, some of which fail, or belong to another block."""
    model, lossfunc = extend(given.model), extend(given.lossfunc)
    total = combined(model, *given.extensions())

    def loss(batch: Any) -> Tensor:
        inputs, targets = split(batch)
        value: Tensor = lossfunc(output_of(model, inputs), targets)
        return value

    for batch in given.items():
        if given.random.random() < 0.2:
            given.told.append("failing")
            with contextlib.suppress(Stopped), total:
                loss(batch).backward()
                raise Stopped
        if given.random.random() < 0.2:
            given.told.append("between")
            with backpack(*given.extensions()):
                loss(batch).backward()
        with total:
            loss(batch).backward()
    return {
        (name, e.savefield): getattr(p, e.savefield)
        for name, p in model.named_parameters()
        for e in given.extensions()
        if p.requires_grad and hasattr(p, e.savefield)
    }
