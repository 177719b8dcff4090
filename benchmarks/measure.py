"""Times in one process, alternately; memory in a process for each number."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from benchmarks.peers import FIRST_ORDER, PEERS, Step
from benchmarks.problems import Problem, find
from benchmarks.quantities import QUANTITIES, Quantity


@dataclass(frozen=True)
class Times:
    """Seconds of every round, by peer."""

    rounds: Mapping[str, list[float]]

    def best(self, peer: str) -> float:
        """The fastest round."""
        return min(self.rounds[peer])

    def ratio(self, peer: str, to: str) -> float:
        """Median over rounds of the ratio of two peers, each pair measured next to each other."""
        pairs = zip(self.rounds[peer], self.rounds[to], strict=True)
        return statistics.median(a / b for a, b in pairs)


# Passes after which one is measured that judges nothing, as the first ones of a structure do; and
# those after which a pass repeats the one before, where they take no longer than these seconds.
SETTLED, REPEATING, PATIENCE = 5, 40, 20.0
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def alternate(
    steps: Mapping[str, Step],
    seconds: float,
    clock: str,
    forget: Callable[[str], None],
    least: int = 2,
    most: int = 300,
    synchronise: Callable[[], None] | None = None,
    before: int = 0,
) -> Times:
    """Run the steps in turn; each of them has run once before.

    Results are dropped between steps: whoever keeps them while another runs would find fresh pages
    where the other finds used ones.

    Args:
        steps: By peer.
        seconds: When to stop, as long as there were enough rounds.
        clock: ``"wall"``, or ``"cpu"`` for the time of this process: for one thread on a machine
            that others use, too.
        forget: Drops the results of a step, by peer.
        least: Fewest rounds.
        most: Most rounds.
        synchronise: Waits for the device, before and after each step; default: nothing to wait for.
        before: How often a step runs in its turn before it counts. Then caches are warm, and the
            results of the pass before are still there, as in a training loop.
    """
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for name in steps:
        forget(name)
    start = time.perf_counter()
    for turn in range(most):
        gc.collect()
        for name, step in steps.items():
            for _ in range(before):
                step()
            rounds[name].append(_seconds(step, CLOCKS[clock], synchronise))
            forget(name)
        if turn + 1 >= least and time.perf_counter() - start > seconds:
            break
    return Times(rounds)


def settle(step: Step) -> None:
    """Run a step of ours until its passes are those of a training loop."""
    start = time.perf_counter()
    for done in range(REPEATING):
        if done >= SETTLED and time.perf_counter() - start > PATIENCE:
            break
        step()


def _seconds(step: Step, clock: Clock, wait: Callable[[], None] | None = None) -> float:
    if wait is not None:
        wait()
    start = clock()
    step()
    if wait is not None:
        wait()
    return clock() - start


def synchroniser(device: str) -> Callable[[], None] | None:
    """What waits for a device; ``None`` for the CPU, which is done when it returns."""
    kind = torch.device(device).type
    return None if kind == "cpu" else getattr(torch, kind).synchronize


def machine(device: str) -> str:
    """The device, and the version of torch."""
    kind = torch.device(device).type
    name = kind if kind == "cpu" else getattr(torch, kind).get_device_name(device)
    return f"{name}, torch {torch.__version__}"


def allocator() -> str:
    """The settings of the C library's allocator, for the head of a table."""
    found = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("MALLOC_")]
    return " ".join(found) or "default allocator"


def write_rate(clock: str = "wall", size: int = 2**28, fresh: bool = True) -> float:
    """Bytes per second of a write.

    Args:
        clock: See :func:`alternate`.
        size: Bytes that are written.
        fresh: Into memory that the process has not used before. Otherwise into memory that was
            written just now, as where results take the place of those of the pass before.
    """
    used = torch.empty(size, dtype=torch.uint8).fill_(0)

    def write() -> None:
        (torch.empty(size, dtype=torch.uint8) if fresh else used).fill_(1)

    return size / min(_seconds(write, CLOCKS[clock]) for _ in range(3))


@cache
def peak_memory(problem: str, quantity: str, peer: str, batch: int, settled: int = 0) -> int | None:
    """Bytes by which the resident set of a fresh process grows during one pass.

    The process has run a plain gradient before, so that libraries are loaded. Freed memory goes
    back to the system at once (``MALLOC_*``), so that the resident set is what is in use.

    Args:
        problem: Its name.
        quantity: Its name.
        peer: Whose pass.
        batch: Number of samples.
        settled: How many passes come before, whose results are dropped.

    Returns:
        ``None`` where the peer cannot compute the quantity.
    """
    command = [sys.executable, "-m", "benchmarks.measure", problem, quantity, peer]
    command += [str(batch), str(torch.get_num_threads()), str(settled)]
    result = subprocess.run(command, env=freeing(), capture_output=True, text=True)
    if result.returncode:
        return None
    return int(json.loads(result.stdout.splitlines()[-1]))


def freeing() -> dict[str, str]:
    """The environment of a process that gives freed memory back to the system at once."""
    limits = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    return {**os.environ, **dict.fromkeys(limits, "65536")}


def growth(step: Step) -> int:
    """Bytes by which the resident set of this process grows at most during a step."""
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    step()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes that a field of this process' status says, as ``VmRSS`` or ``VmHWM``."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def forget_all(models: Mapping[str, nn.Module], name: str) -> None:
    """Drop gradients of a model, and results of whatever extension."""
    for parameter in models[name].parameters():
        parameter.grad = None
        for field in [*parameter.__dict__]:
            if not field.startswith("_"):
                delattr(parameter, field)


def forget(model: nn.Module, quantity: Quantity) -> None:
    """Drop the results, so that every peer gets memory in the same state."""
    model.stored = None  # type: ignore[assignment]
    for parameter in model.parameters():
        for name in (*quantity.fields, "grad_sample"):
            parameter.__dict__.pop(name, None)


def _grow(problem: Problem, quantity: Quantity, peer: str, batch: int, settled: int) -> int:
    warm, _ = PEERS["gradient"](problem, quantity, min(batch, 2))
    warm()
    step, model = {**FIRST_ORDER, **PEERS}[peer](problem, quantity, batch)
    for _ in range(settled):
        step()
        model.zero_grad()
        forget(model, quantity)
    return growth(step)


def _main() -> None:
    problem, quantity, peer, *numbers = sys.argv[1:]
    batch, threads, settled = map(int, numbers)
    torch.set_num_threads(threads)
    print(json.dumps(_grow(find(problem), QUANTITIES[quantity], peer, batch, settled)))


if __name__ == "__main__":
    _main()
