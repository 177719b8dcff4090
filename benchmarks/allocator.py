"""What it costs that memory goes back to the system after a pass: ``benchmarks.allocator``.

For each quantity and peer, in a process for each line: page faults and milliseconds of a pass (the
median), as the allocator is, with the variables of glibc that let it keep what is freed (``kept``),
and after one large block was made and freed, without writing to it (``block``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.measure import SETTLED, forget
from benchmarks.peers import FIRST_ORDER
from benchmarks.problems import find
from benchmarks.quantities import QUANTITIES

KEPT = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"}
ARMS = ("as it is", "kept", "block")
_BLOCK = 2**25 - 2**16  # glibc keeps up to twice the largest block below 32 MiB that was freed


def measure(problem: str, quantity: str, peer: str, arm: str, passes: int = 20) -> None:
    """Print the medians over passes whose results are dropped."""
    torch.set_num_threads(1)
    if arm == "block":
        torch.empty(_BLOCK, dtype=torch.uint8)
    asked, net = QUANTITIES[quantity], find(problem)
    step, model = FIRST_ORDER[peer](net, asked, net.batch)
    faults, times = [], []
    for turn in range(SETTLED + passes):
        before, start = _faults(), time.process_time()
        step()
        if turn >= SETTLED:
            times.append(1000 * (time.process_time() - start))
            faults.append(_faults() - before)
        forget(model, asked)
    print(json.dumps([statistics.median(faults), statistics.median(times)]))


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Print a line for each quantity, peer and setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", default="gpt2")
    parser.add_argument("--quantity", nargs="+", default=["ClippedSumGrad", "SumGradSquared"])
    parser.add_argument("--peer", nargs="+", default=["gradient", "ours", "vmap"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.arm:
        measure(asked.problem, asked.quantity[0], asked.peer[0], asked.arm)
        return
    print(f"{'quantity':16}{'peer':10}{'allocator':10}{'faults':>8}{'ms':>8}")
    for quantity in asked.quantity:
        for peer in asked.peer:
            found: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
            for arm in ARMS * asked.rounds:
                found[arm].append(_child(asked.problem, quantity, peer, arm))
            for arm, rounds in found.items():
                faults, times = map(statistics.median, zip(*rounds, strict=True))
                print(f"{quantity:16}{peer:10}{arm:10}{faults:8.0f}{times:8.1f}", flush=True)


def _child(problem: str, quantity: str, peer: str, arm: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.allocator", "--problem", problem, "--arm", arm]
    command += ["--quantity", quantity, "--peer", peer]
    environment = os.environ | (KEPT if arm == "kept" else {})
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(result.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
