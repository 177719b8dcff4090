"""What the processes of a test run, each by its name."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_core.extensions import (
    EKFAC,
    KFAC,
    BatchDiagGGNMC,
    ClippedSumGrad,
    DiagGGNMC,
    Variance,
)
from backpack_data import Quantities, Weights, accumulate, all_reduce, combined
from backpack_secondorder.over_data import GGN, Fisher, Hessian
from tests import forks
from tests.data.problems import DETERMINISTIC, batches, data, loss, net

SHARES = {1: [7], 2: [5, 2], 4: [3, 1, 1, 2]}  # of samples, by number of ranks
OPTIONS: tuple[dict[str, bool], ...] = (
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
)
DRAWS, BOUND = 3000, 0.1
SHARDED: tuple[dict[str, Any], ...] = ({}, {"reshard_after_forward": False})
KINDS: dict[str, Any] = {
    "ggn": GGN,
    "hessian": Hessian,
    "empirical": partial(Fisher, kind="empirical"),
}


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
        model, lossfunc = extend(net()), extend(loss())
        parallel = DistributedDataParallel(model, **options)
        x, y = share(rank, ranks)
        block = combined(model, *[e() for e in DETERMINISTIC], process_group=group, gather=True)
        for _ in range(2 if options else 1):
            block.reset()
            with block:
                lossfunc(parallel(x), y).backward()
        found = {
            (name, e.savefield): getattr(p, e.savefield)
            for name, p in model.named_parameters()
            for e in DETERMINISTIC
        }
        torch.save(found, folder / f"parallel-{number}-{rank}.pt")


def sharded_net(ranks: int, extended_first: bool = False, **options: Any) -> Any:
    """Shards of a net: two layers by themselves, and the rest."""
    model = net()
    if extended_first:
        extend(model)
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (model[0], model[4], model):
        fully_shard(module, mesh=mesh, **options)
    return model if extended_first else extend(model)


def whole(model: Any, kinds: Any) -> dict[tuple[str, str], Any]:
    """Values of all parameters; those of a parameter's shape are shards, placed like it."""
    found = {}
    for module in model.modules():
        if hasattr(type(module), "reshard"):
            assert all(hasattr(p, kinds[0].savefield) for p in module.parameters())
            module.reshard()
    for name, p in model.named_parameters():
        for kind in kinds:
            value = getattr(p, kind.savefield)
            if isinstance(value, torch.Tensor) and value.shape == p.shape:
                assert value.placements == p.placements, (name, kind)
                assert value.to_local().shape == p.to_local().shape
                value = value.full_tensor()
            found[name, kind.savefield] = value
    return found


def _check_gradients(model: Any, x: Any, y: Any) -> None:
    """What could be shared is not: shards are exchanged before the sums would be there."""
    lossfunc = extend(loss())
    wanted = [p.grad.clone() for p in model.parameters()]
    for _ in range(3):
        model.zero_grad()
        with backpack(Variance(), gradient="shared"):
            lossfunc(model(x), y).backward()
        for p, grad in zip(model.parameters(), wanted, strict=True):
            assert torch.allclose(2 * p.grad.to_local(), grad.to_local())


def in_shards(folder: Path, rank: int, ranks: int) -> None:
    """One backward pass on each rank, joined, with every process holding a part of the model."""
    group, lossfunc = distributed.group.WORLD, extend(loss())
    x, y = share(rank, ranks)
    for number, options in enumerate(SHARDED):
        model = sharded_net(ranks, bool(number), **options)
        model.set_reshard_after_backward(not number)
        block = combined(model, *[e() for e in DETERMINISTIC], process_group=group, gather=True)
        for _ in range(2):
            block.reset()
            with block:
                lossfunc(model(x), y).backward()
        if number:
            assert not hasattr(model[2].weight, "placements")
        torch.save(whole(model, DETERMINISTIC), folder / f"shards-{number}-{rank}.pt")
        assert all(p.grad is not None for p in model.parameters())
        model.set_reshard_after_backward(True)
        _check_gradients(model, x, y)
    # By hand, of a net in single precision that is run in double precision.
    model = net().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    model = extend(fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy))
    kinds = [e for e in DETERMINISTIC if e is not Variance]
    weights = Weights()
    with backpack(*[e() for e in kinds], observer=weights):
        lossfunc(model(x), y).backward()
    for p in model.parameters():  # before: of this rank, for the whole parameter
        assert p.diag_ggn_exact.shape == p.shape
        assert not hasattr(p.diag_ggn_exact, "placements")
    all_reduce(model, [e() for e in kinds], weights, group, gather=True)
    with pytest.raises(UsageError, match="reduced before"):
        all_reduce(model, kinds[0](), weights, group)
    assert model[0].weight.diag_ggn_exact.dtype is torch.float32
    torch.save(whole(model, kinds), folder / f"mixed-{rank}.pt")


def others_in_shards(folder: Path, rank: int, ranks: int) -> None:
    """What is drawn, and what has a threshold."""
    group, model = distributed.group.WORLD, sharded_net(ranks)
    x, y = share(rank, ranks)
    torch.manual_seed(rank)
    drawn = [KFAC(DRAWS), DiagGGNMC(DRAWS), BatchDiagGGNMC(DRAWS)]
    for name, asked in (("drawn", drawn), ("clipped", [ClippedSumGrad(BOUND)])):
        with combined(model, *asked, process_group=group, gather=True):
            extend(loss("mean"))(model(x), y).backward()
        torch.save(whole(model, asked), folder / f"{name}-{rank}.pt")


def over_data_in_shards(folder: Path, rank: int, ranks: int) -> None:
    """Ranks have different numbers of batches, and one factorisation takes two passes."""
    x, y = data(10)
    sizes = {2: [[2, 2, 1], [5]], 4: [[2], [2, 1], [1, 1, 1], [2]]}[ranks]
    first = sum(map(sum, sizes[:rank]))
    mine = slice(first, first + sum(sizes[rank]))
    pairs = list(zip(x[mine].split(sizes[rank]), y[mine].split(sizes[rank]), strict=True))
    kinds = [e for e in DETERMINISTIC if "batch" not in e.savefield and "sqrt" not in e.savefield]
    model = sharded_net(ranks)
    for state_file in (None, folder / "state", folder / "state"):
        found = accumulate(
            model if state_file is None else sharded_net(ranks),
            loss(ignored=-100),
            pairs,
            *[e() for e in kinds],
            EKFAC(None),
            process_group=distributed.group.WORLD,
            progress=False,
            state_file=state_file,
        )
        assert all(p.grad is None for p in model.parameters())
        found.save(folder / f"in-shards-{rank}.saved")
    parameters = dict(model.named_parameters())
    assert found["0.weight", "variance"].placements == parameters["0.weight"].placements
    torch.save(
        dict(Quantities.load(folder / f"in-shards-{rank}.saved")), folder / f"in-shards-{rank}.pt"
    )


def operators(folder: Path, rank: int, ranks: int) -> None:
    """Products with matrices of all samples."""
    x, y = data(8)
    mine = batches(x, y, 3, 1, 3, 1)[rank::ranks]
    found = {}
    for name, kind in KINDS.items():
        matrix = kind(net(), loss(), mine, process_group=distributed.group.WORLD)
        found[name] = matrix @ torch.eye(matrix.shape[0], 3, dtype=torch.float64)
    sampled = Fisher(net(), loss(), mine, process_group=distributed.group.WORLD)
    found["sampled"] = sampled @ torch.eye(sampled.shape[0], 3, dtype=torch.float64)
    torch.save(found, folder / f"operators-{rank}.pt")


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


def killed_in_shards(folder: Path, rank: int, ranks: int) -> None:
    """The same, while every process holds a part of the model."""
    killed(folder, rank, ranks, sharded_net(ranks))


def killed(folder: Path, rank: int, ranks: int, model: Any = None) -> None:
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
        net() if model is None else model,
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
    found.save(folder / f"killed-{rank}.saved")


def without_weight(ways: str, folder: Path, rank: int, ranks: int) -> None:
    """The last rank has a batch whose targets are all ignored; it says so, and all learn it."""
    x, y = data(6)
    y = torch.where(y == 2, 0, y)
    if rank == ranks - 1:
        y[2:4] = 2
    group, pairs = distributed.group.WORLD, batches(x, y, 2, 2, 2)
    begun = time.monotonic()
    try:
        if ways == "combined":
            model, lossfunc = extend(net()), extend(loss())
            for inputs, targets in pairs:
                with combined(model, Variance(), process_group=group):
                    lossfunc(model(inputs), targets).backward()
        elif ways == "all_reduce":
            model, lossfunc = extend(net()), extend(loss())
            for inputs, targets in pairs:
                weights = Weights()
                with backpack(KFAC(), observer=weights):
                    lossfunc(model(inputs), targets).backward()
                all_reduce(model, KFAC(), weights, group)
        else:
            model = sharded_net(ranks) if ways == "shards" else net()
            if ways == "reading" and rank == ranks - 1:
                pairs[1] = (pairs[1][0], "no targets")  # type: ignore[assignment]
            longer = pairs * 2 if rank == 0 else pairs  # the others are through before
            accumulate(model, loss(), longer, Variance(), process_group=group, progress=False)
    finally:
        (folder / f"{ways}-{rank}.seconds").write_text(str(time.monotonic() - begun))


def other_state(folder: Path, rank: int, ranks: int) -> None:
    """The last rank has the state of another run; it says so, and all learn it."""
    begun, pairs = time.monotonic(), batches(*data(6), 2, 2, 2)
    state = folder / "state"
    if rank == ranks - 1:
        file = folder / f"state-{rank}"
        accumulate(net(), loss(), pairs, KFAC(), state_file=file, progress=False)
    options: dict[str, Any] = {"process_group": distributed.group.WORLD, "progress": False}
    try:
        accumulate(net(), loss(), pairs, Variance(), state_file=state, **options)
    finally:
        (folder / f"state-{rank}.seconds").write_text(str(time.monotonic() - begun))


without_weight_accumulated = partial(without_weight, "accumulated")
without_weight_in_shards = partial(without_weight, "shards")
without_weight_combined = partial(without_weight, "combined")
without_weight_reduced = partial(without_weight, "all_reduce")
unreadable = partial(without_weight, "reading")


def start(name: str, folder: Path, ranks: int) -> list[tuple[int, str]]:
    """Run a function on some processes; exit status and error output of each."""
    store = folder / f"store-{name}-{len(list(folder.glob('store-*')))}"
    started = [
        forks.start(run_rank, name, folder, rank, ranks, str(store)) for rank in range(ranks)
    ]
    found = []
    for rank, process in enumerate(started):
        process.join()
        found.append((process.exitcode or 0, _errors_of(folder, rank).read_text()))
    return found


def _errors_of(folder: Path, rank: int) -> Path:
    return folder / f"errors-{rank}"


def run_rank(name: str, folder: Path, rank: int, ranks: int, store: str) -> None:
    """Run a function in this process, and end it."""
    signal.alarm(200)  # rather than wait for others for ever
    sys.stdout = sys.stderr = _errors_of(folder, rank).open("w")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    status = 1
    try:
        globals()[name](folder, rank, ranks)
        distributed.barrier()  # nobody closes connections that others still use
        status = 0
    except Exception:
        traceback.print_exc()
    gc.collect()  # what holds the group, a model in DistributedDataParallel, goes before it
    distributed.destroy_process_group()
    # A device mesh of fully_shard stays in torch, and the group with it: its threads would outlive
    # the interpreter, and abort the process where one lets go of a tensor then.
    sys.stderr.flush()
    os._exit(status)
