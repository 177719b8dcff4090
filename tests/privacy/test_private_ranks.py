"""Two processes train as one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.forks import run_ranks
from tests.privacy.worker import RUNS, STEPS, train, work
from tests.versions import has_shards

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="this torch was built without torch.distributed"
)

MESSAGES = (
    "differs between processes",
    "Leave out max_rows",
    "over a mesh of shape [1, 2]",
    *(["Leave out param_dtype"] if has_shards else []),
    "batch_size differs between processes",
    "The number of weights differs between processes",
    "len(loader.dataset) differs between processes",
    "",  # one of the processes has samples that reach the layer
    "has received only noise",
    "noise_multiplier differs between processes",
    "The clipping differs between processes",
    "sampling differs between processes",
    "users differs between processes",
    "users differs between processes",
    "max_records differs between processes",
    "epochs differs between processes",
    "checks differs between processes",
    "The clipping differs between processes",
    "The list of trained parameters differs between processes",
    "process_group=",
    "private.steps differs between processes",
    "The list of bounds differs between processes",
)


@pytest.mark.host("gloo joins tensors of there")
def test_two_processes_are_one(tmp_path: Path) -> None:
    """With noise once; as they are, as replicas, as shards; with batches that are empty in one."""
    run_ranks(work, 2, tmp_path)
    expected = {adaptive: train("plain", 1, adaptive) for adaptive in (True, False)}
    for rank in range(2):
        runs, refusals = torch.load(tmp_path / f"{rank}.pt")
        for (how, adaptive), (found, share) in zip(RUNS, runs, strict=True):
            parameters, seen = expected[adaptive]
            # Shards run the model in each step, also where there is no sample for this process.
            assert share == STEPS + 4 if how == "shards" else share < seen <= STEPS + 4
            for a, b in zip(found, parameters, strict=True):
                assert (a - b).abs().max() < 1e-12
        for message, said in zip(MESSAGES, refusals, strict=True):
            assert message in said
            assert bool(message) == bool(said)
