"""What quantities of first order cost beside a plain pass: ``python -m benchmarks.gradient``.

A line for each problem, quantity and number of samples: the time of a forward and a backward pass,
relative to a plain one, for this project with every ``gradient=`` of ``backpack(...)``, and for the
peers that are installed, all alternating in one process. Before them stand two limits, the
multiply-adds that are needed at least with and without the plain gradient, and the first write of
the results to fresh memory, which no implementation does without (``writing``, in plain passes).

With ``--memory`` it is bytes, at the peak of a process for each number, above a plain pass.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks.limit import limit, shared_limit
from benchmarks.measure import (
    CLOCKS,
    SETTLED,
    allocator,
    alternate,
    forget,
    machine,
    peak_memory,
    synchroniser,
    write_rate,
)
from benchmarks.peers import FIRST_ORDER, Step
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.quantities import QUANTITIES, Quantity

OURS = ("extended", "ours", "shared", "none")
PEERS = tuple(name for name in FIRST_ORDER if name not in {"gradient", *OURS})
_DEFAULT = ("BatchGrad", "SumGradSquared", "Variance", "FirstFour", "BatchL2Grad", "ClippedSumGrad")
_HEAD = ("limit", "less", *OURS, *PEERS, "writing")


def steps(
    problem: Problem, quantity: Quantity, batch: int, names: Sequence[str], warm: int = SETTLED
) -> tuple[dict[str, Step], dict[str, nn.Module], dict[str, str]]:
    """Those that work, all of them warm; their models; why others are missing."""
    found: dict[str, Step] = {}
    models: dict[str, nn.Module] = {}
    refused: dict[str, str] = {}
    for name in ("gradient", *names):
        try:
            step, model = FIRST_ORDER[name](problem, quantity, batch)
            for _ in range(warm):  # what is shared is judged first
                step()
        except Exception as error:  # whatever it is, the peer cannot do this
            if name in ("gradient", *OURS):
                raise
            refused[name] = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        else:
            found[name], models[name] = step, model
    return found, models, refused


def cell(
    problem: Problem,
    quantity: Quantity,
    batch: int,
    names: Sequence[str],
    seconds: float,
    clock: str,
    wait: Callable[[], None] | None = None,
) -> tuple[float, dict[str, float]]:
    """Seconds of a plain pass, and every column relative to it."""
    found, models, _ = steps(problem, quantity, batch, names)

    def drop(name: str) -> None:
        forget(models[name], quantity)

    times = alternate(found, seconds, clock, drop, least=5, synchronise=wait)
    plain = times.best("gradient")
    row = {name: times.ratio(name, "gradient") for name in found if name != "gradient"}
    for name, bound in (("limit", limit), ("less", shared_limit)):
        least = bound(problem, quantity, batch)
        if least is not None:
            row[name] = least.work
            if wait is None and least.result_bytes > 2**25:  # else memory is used again
                row["writing"] = least.result_bytes / write_rate(clock) / plain
    return plain, row


def memory(
    problem: Problem, quantity: Quantity, batch: int, names: Sequence[str]
) -> tuple[float, dict[str, float]]:
    """Mebibytes of a plain pass, and above it, of every column."""
    peak = partial(peak_memory, problem.name, quantity.name, batch=batch, settled=SETTLED)
    plain = peak("gradient") or 0
    found = {name: peak(name) for name in names}
    return plain / 2**20, {n: (b - plain) / 2**20 for n, b in found.items() if b is not None}


def line(problem: str, quantity: str, batch: int, plain: float, row: dict[str, float]) -> str:
    """A line of the table."""
    numbers = "".join(f"{row[n]:>10.2f}" if n in row else f"{'-':>10}" for n in _HEAD)
    return f"{problem:14}{quantity:16}{batch:>4}{plain:>10.2f}{numbers}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient", description=__doc__)
    add = parser.add_argument
    add("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    add("--quantity", nargs="+", choices=QUANTITIES, default=list(_DEFAULT))
    add("--batch", nargs="+", type=int, help="numbers of samples (default: the problem's)")
    add("--peer", nargs="*", choices=PEERS, default=list(PEERS))
    add("--seconds", type=float, default=10.0)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--clock", choices=CLOCKS, default="wall")
    add("--device", default="cpu", help="where nets and data are (default: cpu)")
    add("--memory", action="store_true", help="measure memory in place of time, on the CPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = _arguments(arguments)
    torch.set_num_threads(options.threads)
    wait = synchroniser(options.device)
    if wait is not None:
        options.clock = "wall"  # the time of this process is not that of the device
    names = [*OURS, *options.peer]
    unit = "plain MB" if options.memory else "plain ms"
    columns = "".join(f"{name:>10}" for name in _HEAD)
    settings = f"{options.threads} threads, {options.clock} clock, {allocator()}"
    print(f"{machine(options.device)}, {settings}")
    print(f"{'problem':14}{'quantity':16}{'N':>4}{unit:>10}{columns}")
    for name in options.problem:
        problem = replace(PROBLEMS[name], device=options.device)
        for kind in options.quantity:
            for batch in options.batch or [problem.batch]:
                at = (problem, QUANTITIES[kind], batch, names)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # peers warn of what does not matter here
                    if options.memory:
                        found = memory(*at)
                    else:
                        plain, row = cell(*at, options.seconds, options.clock, wait)
                        found = plain * 1e3, row
                print(line(name, kind, batch, *found), flush=True)


if __name__ == "__main__":
    main()
