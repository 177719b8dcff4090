"""One of several processes that train privately; it writes where it ended."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from backpack_core.errors import UsageError
from backpack_privacy import AdaptiveClipping, Clipping, make_private
from tests.privacy.problems import loader_of, make

STEPS = 14  # of them some without samples in one of the processes


def train(wrapped: bool, world: int, adaptive: bool) -> tuple[list[torch.Tensor], int]:
    """The parameters in the end, and how many batches this process saw."""
    model, data = make("tied")
    clipping = AdaptiveClipping(0.5, count_noise=5.0) if adaptive else Clipping(0.5, "per_layer")
    whole = DistributedDataParallel(model) if wrapped else model
    lossfunc = nn.CrossEntropyLoss()
    private = make_private(
        whole,
        lossfunc,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader_of(data, 2 // world),
        noise_multiplier=0.5,
        clipping=clipping,
        seed=3,
    )
    seen = 0
    while private.steps < STEPS:
        for inputs, targets in private.loader:
            seen += 1
            private.step(lossfunc(whole(inputs), targets))
    return [p.detach() for p in model.parameters()], seen


def refused(rank: int) -> str:
    """What is said of models that differ."""
    model, data = make("tied", seed=rank)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), loader_of(data, 1)
    try:
        make_private(
            model, nn.CrossEntropyLoss(), optimizer, loader, noise_multiplier=1, max_norm=1
        )
    except UsageError as error:
        return str(error)
    return ""


def work(rank: int, world: int, folder: Path) -> None:
    """What one process does."""
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    found = [train(False, world, True), train(True, world, False)]
    torch.save([*found, refused(rank)], folder / f"{rank}.pt")
    distributed.barrier()
    os._exit(0)  # threads of gloo may outlive the interpreter
