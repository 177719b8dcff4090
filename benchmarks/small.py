"""What quantities cost on small nets, where calls of Python count: ``python -m benchmarks.small``.

For each net, a plain forward and backward pass in microseconds. Then a line each for an extended
model without a block, an empty block, and every quantity:

- the time as a multiple of the plain pass, of this project, the incumbent and ``vmap(grad)``;
- ``us/call``: microseconds above the plain pass for each call of a module (those without children,
  and the loss), which on the smallest nets is nearly all Python;
- ``meas.``: the time with ``check="always"`` over that with ``check="never"``.

All of a net alternate in one process. Each turn of a step is several passes, so that caches are
warm; results stay until the next pass, as in a training loop, and are dropped behind the turn. What
counts is the pass that a tenth of them are faster than: it is one of a structure that is trusted,
since the measured ones (by default 1, 2, 4, 8, ...) become rare, and the first of them come before
the clock runs.

With ``--device cuda`` the clock is the wall's, and every pass is waited for.

The incumbent needs its import name, so ``compat`` must be neither installed nor on the path:
``make bench-env``, then ``.venv-bench/bin/python -m benchmarks.small``.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from backpack_core.errors import BackpackError
from benchmarks import peers
from benchmarks.cells import check
from benchmarks.measure import CLOCKS, SETTLED, allocator, forget, machine, synchroniser
from benchmarks.moved import MOVED
from benchmarks.peers import LIBRARIES, Peer, Step
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.quantities import QUANTITIES, Quantity

Key = tuple[str, str]  # of a line, and of a column

PEERS = ("ours", "incumbent", "vmap")
FIRST_ORDER = (*peers.REDUCTIONS, "ClippedSumGrad")
DEFAULT = (*FIRST_ORDER, "DiagGGNMC", "DiagGGNExact", "KFAC")
PLAIN = ("plain", "plain")
EXTENDED, EMPTY = Quantity("extended", (), ()), Quantity("empty block", (), ())
PASSES, TURN = 10, 0.02  # a turn of a step: at most so many passes, and none after so many seconds


def perceptron(width: int, depth: int) -> nn.Module:
    """Linear layers of one width, the last one to 10 classes, with ``Tanh`` in between."""
    layers: list[nn.Module] = []
    for before, after in pairwise([width] * depth + [10]):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Two convolutions with 8 channels and a linear layer on 1 × 28 × 28."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(968, 10),
    )  # fmt: skip


SMALL = {
    problem.name: problem
    for problem in (
        Problem("3x64", partial(perceptron, 64, 3), (64,), 10, 32, 32),
        Problem("16x32", partial(perceptron, 32, 16), (32,), 10, 8, 8),
        Problem("cnn", cnn, (1, 28, 28), 10, 16, 16),
        PROBLEMS["mlp"],
    )
}
NETS = {**SMALL, **MOVED, **{name: PROBLEMS[name] for name in ("gpt2", "llama")}}


def ways(quantity: Quantity, names: Sequence[str], inside: bool) -> dict[str, Peer]:
    """How each column of a line is computed.

    Args:
        quantity: What the line is about.
        names: Of peers.
        inside: Whether blocks have the forward pass inside, too.
    """
    libraries = [name for name in names if name in LIBRARIES]
    if quantity is EXTENDED:
        return {name: partial(peers.extended, library=name) for name in libraries}
    block = partial(partial, peers.in_a_block, inside=inside)
    found: dict[str, Peer] = {name: block(name) for name in libraries}
    if quantity is not EMPTY and "ours" in names:
        found |= {when: block("ours", check=when) for when in ("always", "never")}
    if quantity.name in FIRST_ORDER and "vmap" in names:
        found["vmap"] = peers.functional
    return found


@dataclass
class Warm:
    """Steps of one net that ran before, so that a structure is trusted.

    Attributes:
        steps: By line and column.
        drops: What drops the results of each.
        refused: Why others are missing: lines by column and reason.
    """

    steps: dict[Key, Step] = field(default_factory=dict)
    drops: dict[Key, Step] = field(default_factory=dict)
    refused: dict[Key, list[str]] = field(default_factory=dict)

    def add(self, key: Key, make: Peer, problem: Problem, quantity: Quantity) -> None:
        """Run a step some times, and keep it if it can do this."""
        line, column = key
        try:
            step, model = make(problem, quantity, problem.batch)
            for _ in range(SETTLED):
                step()
            if quantity.fields:
                check(column, model, quantity)
        except Exception as error:  # whatever it is, the peer cannot do this
            if column not in {"incumbent", "vmap"} and not isinstance(error, BackpackError):
                raise
            reason = str(error).strip().split("\n", 1)[0]
            self.refused.setdefault((column, reason), []).append(line)
        else:
            self.steps[key], self.drops[key] = step, partial(forget, model, quantity)
            self.drops[key]()


def warm(problem: Problem, lines: Sequence[Quantity], names: Sequence[str], inside: bool) -> Warm:
    """The steps of all lines, and the plain pass."""
    found = Warm()
    found.add(PLAIN, peers.gradient, problem, EXTENDED)
    for quantity in lines:
        for column, make in ways(quantity, names, inside).items():
            found.add((quantity.name, column), make, problem, quantity)
    return found


def low(
    steps: Mapping[Key, Step],
    drops: Mapping[Key, Step],
    rounds: int,
    clock: str,
    wait: Callable[[], None] = lambda: None,
) -> dict[Key, float]:
    """Seconds of a pass, by step: a tenth of its passes were faster."""
    now = CLOCKS[clock]
    found: dict[Key, list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        gc.collect()
        for key, step in steps.items():
            begin, passes = time.perf_counter(), 0
            while passes < PASSES and (passes < 2 or time.perf_counter() - begin < TURN):
                wait()
                start = now()
                step()
                wait()
                found[key].append(now() - start)
                passes += 1
            drops[key]()
    return {key: sorted(seconds)[len(seconds) // 10] for key, seconds in found.items()}


def calls(problem: Problem) -> int:
    """Calls of modules in a pass: of those without children, and of the loss."""
    model, count = problem.net(), 1

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    for module in model.modules():
        if not [*module.children()]:
            module.register_forward_hook(note)
    model(problem.data(problem.batch)[0])
    return count


def row(name: str, times: Mapping[Key, float], count: int) -> dict[str, float]:
    """The numbers of a line, by column."""
    plain = times[PLAIN]
    seconds = {column: s for (line, column), s in times.items() if line == name}
    found = {column: seconds[column] / plain for column in PEERS if column in seconds}
    for column in LIBRARIES:
        if column in seconds:
            found[f"us/call {column}"] = 1e6 * (seconds[column] - plain) / count
    if "always" in seconds:
        found["meas."] = seconds["always"] / seconds["never"]
    return found


COLUMNS = {  # widths and digits
    **dict.fromkeys(PEERS, (11, 2)),
    **dict.fromkeys((f"us/call {name}" for name in LIBRARIES), (19, 1)),
    "meas.": (8, 2),
}


def table(
    problem: Problem,
    lines: Sequence[str],
    times: Mapping[Key, float],
    refused: Mapping[Key, Sequence[str]],
) -> str:
    """What is printed for one net."""
    count, plain = calls(problem), 1e6 * times[PLAIN]
    found = [
        f"\n{problem.name}: {problem.batch} samples, {count} calls, plain {plain:.0f} us",
        " " * 16 + "".join(f"{column:>{width}}" for column, (width, _) in COLUMNS.items()),
    ]
    for line in lines:
        numbers = row(line, times, count)
        found.append(f"{line:16}" + "".join(
            f"{numbers[column]:{width}.{digits}f}" if column in numbers else f"{'-':>{width}}"
            for column, (width, digits) in COLUMNS.items()
        ))  # fmt: skip
    for (column, reason), missing in refused.items():
        found.append(f"  no {column} for {', '.join(missing)}: {reason}")
    return "\n".join(found)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small", description=__doc__)
    add = parser.add_argument
    add("--net", nargs="+", choices=NETS, default=list(SMALL), help="gpt2 and llama take minutes")
    add("--quantity", nargs="*", choices=QUANTITIES, default=list(DEFAULT))
    add("--peer", nargs="+", choices=PEERS, default=list(PEERS))
    add("--rounds", type=int, default=20)
    add("--forward-outside", action="store_true", help="blocks have only backward() inside")
    add("--threads", type=int, default=1)
    add("--device", default="cpu", help="where nets and data are (default: cpu)")
    add("--clock", choices=CLOCKS, default="cpu", help="cpu: also on a machine that others use")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = _arguments(arguments)
    torch.set_num_threads(options.threads)
    wait = synchroniser(options.device)
    if wait is not None:
        options.clock = "wall"  # the time of this process is not that of the device
    inside = not options.forward_outside
    lines = [EXTENDED, EMPTY, *(QUANTITIES[name] for name in options.quantity)]
    where = "forward and backward pass" if inside else "backward pass only"
    print(f"blocks: {where}; {options.threads} threads, {options.clock} clock, {allocator()}")
    if wait is not None:
        print(machine(options.device))
    for name in options.net:
        problem = replace(NETS[name], device=options.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peers warn of what does not matter here
            ready = warm(problem, lines, options.peer, inside)
            steps = ready.steps, ready.drops
            times = low(*steps, options.rounds, options.clock, wait or (lambda: None))
        print(table(problem, [q.name for q in lines], times, ready.refused), flush=True)


if __name__ == "__main__":
    main()
