"""A model inside of ``DistributedDataParallel``, whose own nodes take more than tensors."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from backpack_core import backpack, extend
from backpack_core.engine.active import Gradient
from backpack_core.errors import UsageError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Problem
from tests.forks import run_ranks

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="this torch was built without torch.distributed"
)


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("options", ["plain", "static_graph", "find_unused_parameters"])
@pytest.mark.parametrize("source", ["autograd", "shared"])
def test_quantities_under_data_parallel(options: str, source: Gradient) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model, lossfunc = extend(copy.deepcopy(plain)), nn.CrossEntropyLoss()
    given = {} if options == "plain" else {options: True}
    parallel = DistributedDataParallel(model, **given)  # type: ignore[arg-type]
    extended = extend(copy.deepcopy(lossfunc))
    for _ in range(5):
        x, y = torch.randn(4, 3), torch.randint(0, 3, (4,))
        problem = Problem(plain, (x,), lossfunc, y)
        gradients = problem.expected(oracle.individual_gradients)
        diagonals = problem.expected(oracle.ggn_diagonals)
        parallel.zero_grad()
        loss = extended(parallel(x), y)
        with backpack(BatchGrad(), DiagGGNExact(), gradient=source):
            loss.backward()
        for parameter, gradient, diagonal in zip(
            model.parameters(), gradients, diagonals, strict=True
        ):
            oracle.assert_close(parameter.grad_batch, gradient)
            oracle.assert_close(parameter.diag_ggn_exact, diagonal.sum(0))
            oracle.assert_close(parameter.grad, gradient.sum(0))


@pytest.mark.usefixtures("_one_process")
def test_what_data_parallel_waits_for_is_not_left_out() -> None:
    parallel = DistributedDataParallel(extend(nn.Sequential(nn.Linear(3, 3))))
    lossfunc = extend(nn.CrossEntropyLoss())
    loss = lossfunc(parallel(torch.randn(4, 3)), torch.randint(0, 3, (4,)))
    with (
        pytest.raises(UsageError, match="DistributedDataParallel waits for"),
        backpack(BatchGrad(), gradient="none"),
    ):
        loss.backward()


def _train(rank: int, store: str) -> None:
    """One of two processes, which starts once for all that is tried."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(store, 2), rank=rank, world_size=2
    )
    _average(rank)
    _average(rank, gradient_as_bucket_view=True)
    distributed.barrier()  # gloo may abort a process whose peer has left before
    distributed.destroy_process_group()
    # DistributedDataParallel may hold the group past that: its threads would outlive the
    # interpreter, and abort the process.
    os._exit(0)


def _average(rank: int, **options: Any) -> None:
    """Gradients of two processes are averaged, those that are sums of individual ones, too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model = extend(copy.deepcopy(plain))
    parallel = DistributedDataParallel(model, bucket_cap_mb=0, **options)
    lossfunc = extend(nn.CrossEntropyLoss())
    for turn in range(9):
        x, y = torch.randn(8, 9, 3), torch.randint(0, 3, (8,))
        if turn % 2:  # else they are accumulated
            plain.zero_grad()
            parallel.zero_grad()
        nn.CrossEntropyLoss()(plain(x).mean(1), y).backward()
        mine = slice(4 * rank, 4 * rank + 4)
        loss = lossfunc(parallel(x[mine]).mean(1), y[mine])
        with backpack(BatchGrad(), gradient="shared"):
            loss.backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            oracle.assert_close(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.host("gloo joins tensors of there")
def test_shared_gradients_are_averaged(tmp_path: Path) -> None:
    run_ranks(_train, str(tmp_path / "store"))
