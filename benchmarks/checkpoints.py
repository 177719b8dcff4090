"""Memory that checkpoints save, with extensions: ``python -m benchmarks.checkpoints``.

Each number is by how much the resident set of a fresh process grows, in the forward pass and at the
peak, over twelve blocks of three layers of width 64 on 256 samples of 64 tokens.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, BatchL2Grad, DiagGGNExact, DiagGGNMC
from backpack_products.tuning import set_memory_budget
from benchmarks.measure import resident

WAYS = ("none", "one graph", "re-entrant")
EXTENSIONS = {
    "plain": None,
    "extended": (),
    "BatchGrad": (BatchGrad,),
    "BatchL2Grad": (BatchL2Grad,),
    "DiagGGNMC": (DiagGGNMC,),
    "DiagGGNExact": (DiagGGNExact,),
    "in chunks of 1": (partial(DiagGGNExact, chunk_size=1),),
    "2 MiB of memory": (partial(DiagGGNExact, chunk_size=1),),
}


class Model(nn.Module):
    """Blocks of tokens, each in a checkpoint or in none."""

    def __init__(self, way: str, width: int = 64) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(16, width), nn.Linear(width, 5), way
        self.blocks = nn.ModuleList([self._block(width) for _ in range(12)])

    @staticmethod
    def _block(width: int) -> nn.Module:
        layers = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, 16]`` to ``[N, 5]``."""
        h = self.first(x)
        for block in self.blocks:
            if self.way == "none":
                h = block(h)
            else:
                h = checkpoint(block, h, use_reentrant=self.way == "re-entrant")
        result: Tensor = self.last(h.mean(1))
        return result


def measure(way: str, quantity: str, batch: int) -> tuple[int, int]:
    """Bytes in the forward pass, and at the peak."""
    torch.manual_seed(0)
    asked = EXTENSIONS[quantity]
    if quantity == "2 MiB of memory":
        set_memory_budget(2**21)
    model, lossfunc = Model(way), nn.CrossEntropyLoss()
    if asked is not None:
        extend(model), extend(lossfunc)
    x, y = torch.randn(batch, 64, 16), torch.randint(5, (batch,))
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    loss = lossfunc(model(x), y)
    forward = resident("VmRSS") - before
    if asked:
        with backpack(*[kind() for kind in asked]):
            loss.backward()
    else:
        loss.backward()
    return forward, resident("VmHWM") - before


def main() -> None:
    """Print a row for each quantity, or measure one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "QUANTITY"), help="in this process")
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(1)
        measure(*arguments.one, batch=4)
        print(*measure(*arguments.one, batch=256))
        return
    # What is freed goes back to the system at once, so that what is resident is in use.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    print(f"{'MB, forward / peak':20}" + "".join(f"{way:>16}" for way in WAYS))
    for quantity in EXTENSIONS:
        cells = []
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.checkpoints", "--one", way, quantity]
            found = subprocess.run(command, env=environment, capture_output=True, check=True)
            forward, peak = (int(number) / 2**20 for number in found.stdout.split())
            cells.append(f"{forward:8.0f} /{peak:6.0f}")
        print(f"{quantity:20}" + "".join(cells))


if __name__ == "__main__":
    main()
