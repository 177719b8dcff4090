"""What runs between ``backward()`` and ``diag_ggn_exact``: ``python -m benchmarks.trace``.

Counts our own functions (comprehensions are part of the function that they stand in) in a second
pass, which goes by the plan of the first, and in one that repeats what an earlier one computed.
``--calls`` prints them as a tree; ``--passes`` says of which pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

ROOT = Path(__file__).parents[1]
HOMES = [ROOT / "backpack_core", *(ROOT / "plugins").glob("*/backpack_*")]


class Step(NamedTuple):
    """A call of a function: how deep, in which file and line, and its name there."""

    depth: int
    file: str
    line: int
    name: str

    @property
    def entry(self) -> tuple[str, str]:
        """File and name, as :data:`ENTRIES` has them."""
        return self.file, self.name.rsplit(".", 1)[-1]


class Trace:
    """Notes calls of our functions; for ``sys.setprofile``."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Called at every call and return."""
        code = frame.f_code
        home = _home(code.co_filename)
        if home is None or code.co_name.startswith("<"):
            return
        if event == "call":
            name = getattr(code, "co_qualname", code.co_name)
            self.steps.append(Step(self._depth, home, code.co_firstlineno, name))
            self._depth += 1
        elif event == "return":
            self._depth -= 1

    def phases(self) -> Iterator[tuple[str, list[Step]]]:
        """The steps by what autograd, or the user, called: the start, visits, the end."""
        found: list[list[Step]] = []
        for step in self.steps:
            if step.entry in ENTRIES:
                found.append([])
            if found:
                found[-1].append(step)
        for steps in found:
            yield ENTRIES[steps[0].entry], steps


REPEATED = 12  # a pass that repeats what an earlier one computed

# Functions of ours, and what begins with each.
ENTRIES = {
    ("engine/hooks.py", "begin"): "start",
    ("engine/hooks.py", "after"): "visit",
    ("engine/backward.py", "finish"): "end",
}


def _home(filename: str) -> str | None:
    path = Path(filename)
    for home in HOMES:
        if path.is_relative_to(home):
            inside = path.relative_to(home).as_posix()
            return inside if home.name == "backpack_core" else f"{home.name}/{inside}"
    return None


def trace(passes: int = 2) -> Trace:
    """The last of some passes of ``DiagGGNExact`` over Linear, ReLU, Linear, cross-entropy."""
    model = extend(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    lossfunc = extend(nn.CrossEntropyLoss())
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    found, before = Trace(), sys.getprofile()
    for left in reversed(range(passes)):
        loss = lossfunc(model(x), y)
        with backpack(DiagGGNExact(), check="never"):
            if not left:
                sys.setprofile(found)
            try:
                loss.backward()
            finally:
                sys.setprofile(before)
    return found


def numbers(steps: list[Step]) -> tuple[int, int, int]:
    """Calls, functions and files."""
    functions = {(step.file, step.line) for step in steps}
    return len(steps), len(functions), len({file for file, _ in functions})


def main() -> None:
    """Print the numbers, of all and of each phase."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print the calls as a tree")
    parser.add_argument("--passes", type=int, default=2, help="which pass")
    options = parser.parse_args()
    found = trace(options.passes)
    if options.calls:
        for step in found.steps:
            print(f"{'  ' * step.depth}{step.name}  {step.file}")
    for name, steps in (("all", found.steps), *found.phases()):
        print("{}: {} calls of {} functions in {} files".format(name, *numbers(steps)))
    repeated = numbers(trace(REPEATED).steps)
    print("one that repeats: {} calls of {} functions in {} files".format(*repeated))


if __name__ == "__main__":
    main()
