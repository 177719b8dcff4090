"""Kills a run that fills a store at random moments, and starts it again.

``python -m tests.attribution.crash [KILLS]``. No shard is lost or half read: after each kill the
store opens, has all that it had before, and every row is what was appended.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from backpack_attribution import GradientStore
from tests.forks import LIMIT, start

EACH, BATCH, WIDTH = 150, 4, 1000  # batches for each kill, samples of a batch, numbers of a sample


def row(sample: int) -> Tensor:
    """Different for each sample, and cheap."""
    return torch.arange(WIDTH, dtype=torch.float32) * 1e-3 + sample


def work(folder: Path, samples: int) -> None:
    """Appends what is missing; shards have one batch or two."""
    torch.set_num_threads(1)
    with GradientStore(folder, shard_bytes=6 * WIDTH * 4) as store:
        for first in range(0, samples, BATCH):
            names = [*range(first, first + BATCH)]
            todo = [names[n] for n in store.missing(names)]
            if todo:
                store.append(todo, {"w": torch.stack([*map(row, todo)])})


def stored(folder: Path) -> set[int | str]:
    """Identities in the store; every row is compared."""
    if not folder.exists():
        return set()
    store = GradientStore(folder)
    for names, gradients in store.blocks():
        wanted = torch.stack([row(int(name)) for name in names])
        assert torch.equal(gradients["w"], wanted)
    return {*store.identities}


def crash(parent: Path, kills: int, seed: int) -> int:
    """Fill a store under kills; how many of these hit a run that had written.

    Raises:
        AssertionError: A shard was lost or half written, or a row differs.
    """
    folder, samples = parent / "store", EACH * BATCH * kills
    draw, hits, before = random.Random(seed), 0, set[int | str]()
    for _ in range(kills):
        process, stop = start(work, folder, samples), time.monotonic() + 60
        while process.is_alive() and time.monotonic() < stop:
            if len([*folder.glob("*.safetensors")]) > len(before) // (2 * BATCH):
                break
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        now = stored(folder)
        assert before <= now
        hits += now > before
        before = now
    last = start(work, folder, samples)
    last.join(LIMIT)
    assert last.exitcode == 0
    assert stored(folder) == {*range(samples)}
    assert not [*folder.glob(".*.safetensors.*")]
    return hits


if __name__ == "__main__":
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as name:
        hits = crash(Path(name), asked, seed=int(time.time()))
    print(f"{hits} kills of {asked} hit a run that had written; no shard is lost or half written")
