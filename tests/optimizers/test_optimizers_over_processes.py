"""Two processes train as one does on the joined batch."""

from __future__ import annotations

import copy
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from backpack_core.errors import UsageError
from backpack_optimizers import EKFAC, KFAC, GaussNewton, LevenbergMarquardt
from backpack_optimizers.processes import shared_out
from tests.forks import run_ranks
from tests.optimizers.problems import closure_of, problem, train, values

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pi": (KFAC, {}),
    "exact": (KFAC, {"split": "exact", "factors_every": 2}),
    "ekfac": (EKFAC, {"inverses_every": 2}),
    "adapted": (EKFAC, {"adapt": LevenbergMarquardt(every=1, shrink=0.5)}),
    "conv": (KFAC, {}),
}
PARTS = (slice(0, 5), slice(5, 7))


def trained(case: str, reduction: str, part: slice, group: Any) -> torch.Tensor:
    kind, settings = CASES[case]
    model, lossfunc, x, y = problem("conv" if case == "conv" else "mlp", reduction)
    optimizer = kind(model, damping=0.1, mc_samples=None, process_group=group, **settings)
    data = x[part], y[part]
    if "adapt" in settings:
        for _ in range(4):
            optimizer.step(closure_of(optimizer, model, lossfunc, *data))
    else:
        train(optimizer, model, lossfunc, *data, steps=4)
    return values(model)


def hessian_free(part: slice, group: Any) -> torch.Tensor:
    model, lossfunc, x, y = problem()
    optimizer = GaussNewton(model, lossfunc, rtol=1e-10, process_group=group)
    for _ in range(2):
        optimizer.step([(x[part], y[part])])
    return values(model)


def work(rank: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    file = f"file://{folder}/store"
    distributed.init_process_group("gloo", file, rank=rank, world_size=2)
    group = distributed.group.WORLD
    found = {
        (case, reduction): trained(case, reduction, PARTS[rank], group)
        for case in CASES
        for reduction in ("mean", "sum")
    }
    found["hessian free", "mean"] = hessian_free(PARTS[rank], group)
    model, lossfunc, x, y = problem()
    part = slice(rank, None, 2)
    if rank == 0:
        part = slice(0, 6, 2)  # of one size: then its average is that of the samples
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    optimizer = KFAC(wrapped, damping=0.1, mc_samples=None, process_group=group)
    train(optimizer, wrapped, lossfunc, x[part], y[part], 2)
    found["wrapped", "mean"] = values(wrapped)
    said = []
    for other in (model, None):
        try:
            optimizer.zero_grad()
            with optimizer.curvature() if other is model or not rank else nullcontext():
                lossfunc((other if other and rank else wrapped.module)(x), y).backward()
            optimizer.step()
        except UsageError as error:
            said.append(str(error))
    torch.save((found, said), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.host("gloo joins tensors of there")
@pytest.mark.skipif(
    not distributed.is_available() or sys.platform == "win32",
    reason="this torch was built without torch.distributed, or has no gloo over files",
)
def test_two_processes_are_one_on_the_joined_batch() -> None:
    wanted = {
        (case, reduction): trained(case, reduction, slice(None), None)
        for case in CASES
        for reduction in ("mean", "sum")
    }
    wanted["hessian free", "mean"] = hessian_free(slice(None), None)
    model, lossfunc, x, y = problem()
    optimizer = KFAC(model, damping=0.1, mc_samples=None)
    train(optimizer, model, lossfunc, x[:6], y[:6], 2)
    wanted["wrapped", "mean"] = values(model)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(work, folder)
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
    for found, said in results:
        for case, value in wanted.items():
            assert torch.allclose(found[case], value, rtol=1e-9, atol=1e-9), case
        assert len(said) == 2  # where one has a pass of another model, and where it has none
        assert all("of different parameters" in text for text in said)


def test_the_largest_inversions_go_to_who_has_least_to_do() -> None:
    model, lossfunc, x, y = problem()
    optimizer = KFAC(model)
    train(optimizer, model, lossfunc, x, y)
    owners = shared_out(optimizer._averages, 2)
    costs = [0.0, 0.0]
    for p, owner in owners.items():
        costs[owner] += sum(f.shape[-1] ** 3 for f in optimizer._averages[p])
    assert max(costs) <= 1.5 * min(costs)
