"""A model inside of ``DistributedDataParallel``, whose own nodes take more than tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Problem

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
def test_quantities_under_data_parallel(options: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model, lossfunc = extend(copy.deepcopy(plain)), nn.CrossEntropyLoss()
    given = {} if options == "plain" else {options: True}
    parallel = DistributedDataParallel(model, **given)  # type: ignore[arg-type]
    extended = extend(copy.deepcopy(lossfunc))
    for _ in range(3):
        x, y = torch.randn(4, 3), torch.randint(0, 3, (4,))
        problem = Problem(plain, (x,), lossfunc, y)
        gradients = problem.expected(oracle.individual_gradients)
        diagonals = problem.expected(oracle.ggn_diagonals)
        parallel.zero_grad()
        loss = extended(parallel(x), y)
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()
        for parameter, gradient, diagonal in zip(
            model.parameters(), gradients, diagonals, strict=True
        ):
            oracle.assert_close(parameter.grad_batch, gradient)
            oracle.assert_close(parameter.diag_ggn_exact, diagonal.sum(0))
            oracle.assert_close(parameter.grad, gradient.sum(0))
