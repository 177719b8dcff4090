"""Kills a run over a data set at random moments, and starts it again.

``python -m tests.data.crash [KILLS]``. No state file is lost or half written: each one can be read,
and the numbers at the end are those of a run that nobody disturbed.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from backpack_core.extensions import KFAC, DiagGGNExact, DiagGGNMC
from backpack_data import accumulate, files
from tests.data.problems import data, loss, net

EACH = 80  # samples of the data set for each kill


def work(folder: Path, name: str, samples: int) -> None:
    """A run that writes its state after each batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*data(samples)), 4, shuffle=True)
    found = accumulate(
        net(),
        loss(ignored=-100),
        loader,
        KFAC(),
        DiagGGNExact(),
        DiagGGNMC(),
        state_file=folder / f"{name}.state",
        every=1,
        progress=False,
    )
    found.save(folder / f"{name}.result")


def start(folder: Path, name: str, samples: int) -> subprocess.Popen[bytes]:
    command = "import sys; from pathlib import Path; from tests.data.crash import work; "
    command += "work(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))"
    return subprocess.Popen([sys.executable, "-c", command, str(folder), name, str(samples)])


def crash(folder: Path, kills: int, seed: int) -> int:
    """Run twice, once with kills; how many of these hit a run that had written.

    Raises:
        AssertionError: A file was lost or half written, or numbers differ.
    """
    samples = EACH * kills
    assert start(folder, "quiet", samples).wait() == 0
    draw, state, hits = random.Random(seed), folder / "killed.state", 0
    done = 0
    for _ in range(kills):
        process, before = start(folder, "killed", samples), done
        # Not before something new was written, and then at any moment.
        stop = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < stop and _done(state) <= before:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        process.kill()
        if process.wait() == 0:
            break
        hits += 1
        done = _done(state)
        assert done > before
    assert start(folder, "killed", samples).wait() == 0
    wanted, _ = files.read(folder / "quiet.result", "quantities")
    found, _ = files.read(folder / "killed.result", "quantities")
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), name
    assert hits, "no kill hit the run"
    return hits


def _done(state: Path) -> int:
    """How far the state is; reading it fails where it is half written."""
    return int(files.read(state, "state")[1].get("done 1", 0)) if state.exists() else 0


if __name__ == "__main__":
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as name:
        hits = crash(Path(name), asked, seed=int(time.time()))
    print(f"{hits} kills of {asked} hit the run; the numbers are those of an undisturbed one")
