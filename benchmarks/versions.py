"""Two checkouts side by side: ``python -m benchmarks.versions OTHER [--problem ...]``.

A process of each runs the same cells in turn, with the Python of its own ``.venv``, so that both
see the same machine. Printed is the time of this checkout over that of the other, cell by cell, and
the geometric mean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.cells import LARGEST
from benchmarks.limit import largest, limit
from benchmarks.problems import PROBLEMS
from benchmarks.quantities import QUANTITIES

ROOT = Path(__file__).parents[1]
# Runs in both, so it uses nothing but what both have.
WORKER = """
import json, sys, time, warnings
import torch
from benchmarks.peers import ours
from benchmarks.problems import PROBLEMS
from benchmarks.quantities import QUANTITIES

warnings.simplefilter("ignore")
torch.set_num_threads(int(sys.argv[1]))
clock = getattr(time, sys.argv[2])
step = None
for line in sys.stdin:
    asked = json.loads(line)
    try:
        if "problem" in asked:
            step = model = None
            problem, quantity = PROBLEMS[asked["problem"]], QUANTITIES[asked["quantity"]]
            batch = problem.exact_batch if quantity.exact else problem.batch
            step, model = ours(problem, quantity, batch)
            for _ in range(3):
                step()
            answer = 0.0
        else:
            for parameter in model.parameters():
                parameter.grad = None
                vars(parameter).clear()
            start = clock()
            step()
            answer = clock() - start
    except Exception as error:
        answer = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    print(json.dumps(answer), flush=True)
"""
CLOCKS = {"wall": "perf_counter", "cpu": "process_time"}


class Checkout:
    """A process that runs cells of one checkout."""

    def __init__(self, folder: Path, threads: int, clock: str) -> None:
        self._process = subprocess.Popen(
            [folder / ".venv/bin/python", "-c", WORKER, str(threads), CLOCKS[clock]],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )

    def ask(self, **question: str) -> float | str:
        """Prepare a cell, or (without a question) run it once; seconds, or why not."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer: float | str = json.loads(process.stdout.readline())
        return answer


def compare(ours: Checkout, other: Checkout, cell: dict[str, str], seconds: float) -> float | str:
    """The median ratio of times, measured in turn; or why there is none."""
    for checkout in (ours, other):
        answer = checkout.ask(**cell)
        if isinstance(answer, str):
            return answer
    ratios: list[float] = []
    spent = 0.0
    while len(ratios) < 5 or (spent < seconds and len(ratios) < 400):
        mine, theirs = ours.ask(), other.ask()
        if isinstance(mine, str) or isinstance(theirs, str):
            return f"{mine} / {theirs}"
        ratios.append(mine / theirs)
        spent += mine + theirs
    return statistics.median(ratios)


def needed(problem: str, quantity: str) -> int:
    """Bytes of the largest tensor of a cell."""
    kind, what = PROBLEMS[problem], QUANTITIES[quantity]
    return largest(kind, what, limit(kind, what, kind.exact_batch if what.exact else kind.batch))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout, with its .venv")
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--quantity", nargs="+", choices=QUANTITIES, default=list(QUANTITIES))
    parser.add_argument("--seconds", type=float, default=4.0, help="for each cell")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    ours, other = (Checkout(f, options.threads, options.clock) for f in (ROOT, options.other))
    found: list[float] = []
    for problem in options.problem:
        for quantity in options.quantity:
            cell = {"problem": problem, "quantity": quantity}
            is_large = 2 * needed(problem, quantity) > LARGEST  # there are two processes
            result = "too large" if is_large else compare(ours, other, cell, options.seconds)
            text = result if isinstance(result, str) else f"{result:6.3f}"
            print(f"{problem:12} {quantity:24} {text}", flush=True)
            if isinstance(result, float):
                found.append(result)
    mean = math.exp(statistics.fmean(map(math.log, found))) if found else math.nan
    print(f"geometric mean of {len(found)} cells: {mean:.3f}")
    sys.exit(0)


if __name__ == "__main__":
    main()
