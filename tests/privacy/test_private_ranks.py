"""Two processes train as one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.forks import run_ranks
from tests.privacy.worker import STEPS, train, work

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="this torch was built without torch.distributed"
)


def test_two_processes_are_one(tmp_path: Path) -> None:
    """With noise once; with and without the wrapper; with batches that are empty in one of them."""
    run_ranks(work, 2, tmp_path)
    for number, adaptive in enumerate((True, False)):
        expected, seen = train(False, 1, adaptive)
        for rank in range(2):
            found, share = torch.load(tmp_path / f"{rank}.pt")[number]
            assert share < seen
            for a, b in zip(found, expected, strict=True):
                assert (a - b).abs().max() < 1e-12
    assert seen <= STEPS + 4
    for rank in range(2):
        assert "differs between processes" in torch.load(tmp_path / f"{rank}.pt")[2]
