"""What ``samples=`` costs: ``python -m benchmarks.told``.

Forward and backward passes on small nets in which two rows belong to each sample: without
``samples=`` (each row is a sample), with an index that stays, and with another one in each pass.
The last is surveyed each time. All alternate in one process, the 10 % quantile of the time of the
process counts, and multiples are of a plain pass.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from backpack_core import backpack, extend, extensions
from benchmarks.captured import PROBLEMS

NETS, QUANTITIES = ("3x64", "16x32", "cnn"), ("BatchGrad", "BatchL2Grad", "ClippedSumGrad")
COLUMNS = ("rows", "same index", "other index")


def ways(net: str, quantity: str) -> dict[str, Callable[[], None]]:
    """A plain pass, and one for each column."""
    problem = PROBLEMS[net]
    x, y = problem.data(problem.batch)
    plain, bare = problem.net(), torch.nn.CrossEntropyLoss()
    model, lossfunc = extend(problem.net()), extend(torch.nn.CrossEntropyLoss())
    settings = (1.0,) if quantity == "ClippedSumGrad" else ()
    extension = getattr(extensions, quantity)(*settings)
    pairs = torch.arange(len(x)) // 2

    def step(samples: Callable[[], Tensor | None]) -> Callable[[], None]:
        def run() -> None:
            with backpack(extension, samples=samples()):
                lossfunc(model(x), y).backward()

        return run

    return {
        "plain": lambda: bare(plain(x), y).backward(),
        "rows": step(lambda: None),
        "same index": step(lambda: pairs),
        "other index": step(lambda: pairs[torch.randperm(len(pairs))]),
    }


def main() -> None:
    """Print a line for each net and quantity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", nargs="*", default=[*NETS], choices=[*PROBLEMS])
    parser.add_argument("--quantity", nargs="*", default=[*QUANTITIES])
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'':24}{'plain, µs':>12}" + "".join(f"{column:>14}" for column in COLUMNS))
    for net in given.net:
        for quantity in given.quantity:
            steps = ways(net, quantity)
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(70):
                for step in steps.values():
                    step()
            end = time.perf_counter() + given.seconds
            while time.perf_counter() < end:
                for name, step in steps.items():
                    start = time.process_time()
                    step()
                    times[name].append(time.process_time() - start)
            found = {name: sorted(seen)[len(seen) // 10] for name, seen in times.items()}
            cells = "".join(f"{found[column] / found['plain']:14.2f}" for column in COLUMNS)
            print(f"{net + ', ' + quantity:24}{found['plain'] * 1e6:12.0f}{cells}", flush=True)


if __name__ == "__main__":
    main()
