"""Runs that are stopped at moments that are drawn, and resumed: the numbers of one that was not.

Models, extensions and loaders draw random numbers. ``make test ARGS="--nets=50000
tests/data/test_random_resumption.py"`` draws 660.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backpack_core.extensions import (
    EKFAC,
    KFAC,
    BatchGrad,
    DiagGGNMC,
    ProjectedGrad,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from backpack_data import Quantities, accumulate, files
from tests.drawn import judge, made

SHARE, LEAST = 75, 4
EXTENSIONS: list[Any] = [
    *(BatchGrad, SumGradSquared, Variance, DiagGGNMC, SqrtGGNMC, EKFAC),
    *(lambda: KFAC(2), lambda: ProjectedGrad(4, "sparse")),
]


class Stopped(BaseException):
    """What a run is stopped by."""


class Counted(nn.Module):
    """Random in train mode; it stops at a forward pass that is given."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 3), nn.Dropout(rate), nn.Linear(3, 3)
        self.left = [10**9]
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise Stopped
        self.get_buffer("seen").add_(1)
        result: Tensor = self.last(self.drop(self.first(x)).tanh())
        return result


class Case:
    """One run, described by what was drawn."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random, self.folder, self.seed = Random(seed), folder, seed
        draw = self.random
        torch.manual_seed(seed)
        self.x, self.y = torch.randn(9, 4), torch.randint(3, (9,))
        self.rate, self.size = draw.choice([0.0, 0.5]), draw.choice([1, 2, 4])
        self.kind = draw.choice(["list", "plain", "own generator", "generator of torch", "workers"])
        self.made = draw.sample(EXTENSIONS, draw.randint(1, 3))
        self.reduction, self.every = draw.choice(["mean", "sum"]), draw.choice([1, 2, 3])
        self.captures = draw.random() < 0.3
        self.told = [seed, self.rate, self.size, self.kind, self.reduction, self.every]
        self.told += [self.captures, [type(make()).__name__ for make in self.made]]
        self.model, self.lossfunc = (
            Counted(self.rate),
            nn.CrossEntropyLoss(reduction=self.reduction),
        )

    def loader(self) -> Any:
        if self.kind == "list":
            return [*zip(self.x.split(self.size), self.y.split(self.size), strict=True)]
        options: dict[str, Any] = {"shuffle": self.kind in ("own generator", "generator of torch")}
        if self.kind == "own generator":
            options["generator"] = torch.Generator().manual_seed(self.seed)
        if self.kind == "workers":
            options["num_workers"] = 1 if self.seed % 10 == 0 else 0
        return DataLoader(TensorDataset(self.x, self.y), self.size, **options)

    def run(self, model: nn.Module, loader: Any, path: Path, **options: Any) -> Quantities:
        extensions = [make() for make in self.made]
        return accumulate(
            *(model, self.lossfunc, loader, *extensions),
            state_file=path,
            every=self.every,
            progress=False,
            capture=self.captures,
            **options,
        )

    def stopped_run(self, model: Any, path: Path) -> Quantities:
        """Started again until it is through."""
        batches = -(-9 // self.size)
        for _ in range(self.random.randint(1, 3)):
            how = self.random.choice(["forward", "write", "written"])
            number = self.random.randint(0, 2 * batches)
            self.told.append((how, number))
            model.left[0] = number if how == "forward" else 10**9
            with contextlib.suppress(Stopped), _writing(how, number // self.every):
                self.run(model, self.loader(), path)
            if self.random.random() < 0.5:
                model = copy.deepcopy(model)
            # Another process begins elsewhere; without a file, it is the first.
            torch.manual_seed(self.random.randrange(99) if path.exists() else self.seed + 1)
        model.left[0] = 10**9
        return self.run(model, self.loader(), path)


@contextlib.contextmanager
def _writing(how: str, number: int) -> Iterator[None]:
    """A block in which a file is the last one, or is not written."""
    write, left = files.write, [number]

    def writing(*args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] < 0 and how == "write":
            raise Stopped
        write(*args, **kwargs)
        if left[0] < 0 and how == "written":
            raise Stopped

    files.write = writing
    try:
        yield
    finally:
        files.write = write


def fault_of(seed: int, folder: Path) -> str:
    """What is wrong with a resumed run."""
    case = Case(seed, folder)
    torch.manual_seed(seed + 1)
    right = case.run(copy.deepcopy(case.model), case.loader(), folder / "whole")
    state = torch.get_rng_state()
    torch.manual_seed(seed + 1)
    found = case.stopped_run(copy.deepcopy(case.model), folder / "stopped")
    tensors = right.tensors()
    if found.tensors().keys() != tensors.keys() or found.normaliser != right.normaliser:
        return f"{case.told}: other values"
    for name, tensor in found.tensors().items():
        if not torch.equal(tensor, tensors[name]):
            return f"{case.told}: {name} differs"
    if found.batches != right.batches:
        return f"{case.told}: {found.batches} batches instead of {right.batches}"
    is_alike = torch.equal(torch.get_rng_state(), state)
    return "" if is_alike else f"{case.told}: the generator is elsewhere"


def test_random_resumption(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    judge(request, SHARE, LEAST, lambda seed: fault_of(seed, made(tmp_path / str(seed))))
    torch.set_num_threads(threads)
