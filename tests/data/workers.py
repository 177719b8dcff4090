"""What the processes of a test run, each by its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from backpack_core import extend
from backpack_data import accumulate, combined
from backpack_secondorder.diag_hessian import HessianExtension
from tests.data.problems import DETERMINISTIC, data, loss, net

SHARES = {1: [7], 2: [5, 2], 4: [3, 1, 1, 2]}  # of samples, by number of ranks
OPTIONS: tuple[dict[str, bool], ...] = (
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
)


def share(rank: int, ranks: int) -> Any:
    """The samples of a rank; each of them has one whose weight is not zero."""
    x, y = data()
    sizes = SHARES[ranks]
    first = sum(sizes[:rank])
    return x[first : first + sizes[rank]], y[first : first + sizes[rank]]


def in_parallel(folder: Path, rank: int, ranks: int) -> None:
    """One backward pass on each rank, joined, in every mode of DistributedDataParallel."""
    group = distributed.group.WORLD
    for number, options in enumerate(OPTIONS):
        # What DistributedDataParallel puts behind the model is not known to be linear.
        kinds = [e for e in DETERMINISTIC if not (options and issubclass(e, HessianExtension))]
        model, lossfunc = extend(net()), extend(loss())
        parallel = DistributedDataParallel(model, **options)
        x, y = share(rank, ranks)
        block = combined(model, *[e() for e in kinds], process_group=group, gather=True)
        for _ in range(2 if options else 1):
            block.reset()
            with block:
                lossfunc(parallel(x), y).backward()
        found = {
            (name, e.savefield): getattr(p, e.savefield)
            for name, p in model.named_parameters()
            for e in kinds
        }
        torch.save(found, folder / f"parallel-{number}-{rank}.pt")


def over_data(folder: Path, rank: int, ranks: int) -> None:
    """Over a data set of which the sampler repeats samples."""
    dataset = TensorDataset(*data(10))
    sampler: Any = DistributedSampler(dataset, ranks, rank, shuffle=True, seed=3)
    loader = DataLoader(dataset, 2, sampler=sampler)
    asked = [e() for e in DETERMINISTIC if "batch" not in e.savefield and "sqrt" not in e.savefield]
    found = accumulate(
        net(),
        loss(ignored=-100),
        loader,
        *asked,
        process_group=distributed.group.WORLD,
        progress=False,
    )
    torch.save(dict(found), folder / f"data-{rank}.pt")


def killed(folder: Path, rank: int, ranks: int) -> None:
    """The last rank is killed at its third batch, the first time."""
    pairs = list(zip(*[t.split(1) for t in data(8)], strict=True))[rank::ranks]
    mark = folder / "was killed"
    steps = iter(range(100))

    def split(item: Any) -> Any:
        if next(steps) == 2 and rank == ranks - 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    found = accumulate(
        net(),
        loss(ignored=-100),
        pairs,
        *[e() for e in DETERMINISTIC[2:5]],
        batch=split,
        state_file=folder / "state.safetensors",
        every=1,
        process_group=distributed.group.WORLD,
        timeout=3.0,
        progress=False,
    )
    torch.save(dict(found), folder / f"killed-{rank}.pt")


def start(name: str, folder: Path, ranks: int) -> list[tuple[int, str]]:
    """Run a function on some processes; exit status and error output of each."""
    store = folder / f"store-{name}-{len(list(folder.glob('store-*')))}"
    command = [sys.executable, "-m", "tests.data.workers", name, str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(store)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    return [(p.returncode, error) for p, error in zip(processes, errors, strict=True)]


if __name__ == "__main__":
    name, folder, rank, ranks, store = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
    )
    {"in_parallel": in_parallel, "over_data": over_data, "killed": killed}[name](
        Path(folder), int(rank), int(ranks)
    )
    distributed.destroy_process_group()
