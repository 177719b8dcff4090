"""Two processes train as one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.privacy.worker import STEPS, train

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="this torch was built without torch.distributed"
)


def test_two_processes_are_one(tmp_path: Path) -> None:
    """With noise once; with and without the wrapper; with batches that are empty in one of them."""
    module, paths = "tests.privacy.worker", [str(tmp_path / "store"), str(tmp_path)]
    commands = [[sys.executable, "-m", module, str(rank), "2", *paths] for rank in range(2)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in started:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
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
