"""Processes of a test: of two, each has every second sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from backpack_attribution import GradientStore, Influence, LoGra, fill, influence, self_influence
from backpack_core.errors import UsageError
from backpack_firstorder import Projection
from tests.attribution.problems import loader, tied, tokens
from tests.attribution.test_unreached import QUERIES, Mixture, X, Y
from tests.forks import run_ranks

METHODS: dict[str, Any] = {
    "dot": lambda: "dot",
    "cosine": lambda: "cosine",
    "ekfac": lambda: Influence(mc_samples=None),
    "ekfac-cg": lambda: Influence(mc_samples=None, refine=3),
    "logra": lambda: "logra",
    "trak": lambda: "trak",
}
SAMPLES = 9


def scores(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Scores by all methods, and by a store that all processes fill."""
    group = distributed.group.WORLD if ranks > 1 else None
    model, lossfunc = tied(), nn.CrossEntropyLoss()
    train = loader(tuple(t[rank::ranks] for t in tokens(SAMPLES)), 2)  # type: ignore[arg-type]
    queries = loader(tokens(3, seed=2), 2)
    found = {}
    for name, method in METHODS.items():
        found[name] = influence(model, lossfunc, train, queries, method(), process_group=group)
    found["itself"] = self_influence(
        model, lossfunc, train, METHODS["ekfac-cg"](), process_group=group
    )
    torch.manual_seed(0)
    # Of two processes, each has the samples of one expert.
    dealt = [part[[0, 6, 1, 7]][rank::ranks] for part in (X, Y)]
    found["experts"] = influence(
        Mixture(False), lossfunc, [tuple(dealt)], QUERIES, LoGra(4), process_group=group
    )
    store = GradientStore(folder / f"store-{ranks}", dtype=torch.float64)
    fill(store, model, lossfunc, train, Projection(5), process_group=group)
    if ranks > 1:
        whole = loader(tokens(SAMPLES), 2)
        with pytest.raises(UsageError, match=f"each would count {ranks} times"):
            influence(model, lossfunc, whole, queries, "dot", process_group=group)
    return {name: (value.values, value.train) for name, value in found.items()}


def start(ranks: int, folder: Path) -> None:
    """Run :func:`scores` in processes; each saves what it found."""
    run_ranks(work, folder, ranks, ranks=ranks)


def work(rank: int, path: Path, ranks: int) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group(
        "gloo", init_method=f"file://{path}/meeting-{ranks}", rank=rank, world_size=ranks
    )
    torch.save(scores(rank, ranks, path), path / f"scores-{ranks}-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
