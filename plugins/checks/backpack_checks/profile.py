"""Measures where the time of a block goes, by module and extension. Imports the record.

This costs two readings of the clock for each value that is read and each quantity that is sent.
While a profiler of torch runs, its trace gets a label for each of them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from backpack_checks._torch import profiler_runs
from backpack_checks.sums import SumCheck
from backpack_core.record.call import path_of


class Row(NamedTuple):
    """What one extension took at one module.

    Attributes:
        module: Path of the module.
        extension: Name of the extension; of the propagator where a quantity is sent on.
        way: ``"rule"``, ``"autodiff"`` (where any parameter takes it), ``"graph"`` (from the graph
            of the loss), ``"sent"``, or ``"check"`` (the library's own, in the first passes of a
            structure).
        calls: How often, chunks of columns and passes included; parameters of one call are read
            together.
        seconds: The time. On an accelerator, that of starting kernels: use a profiler there.
        bytes: Size of what was read, or sent, last.
    """

    module: str
    extension: str
    way: str
    calls: int
    seconds: float
    bytes: int


class Profile:
    """Adds up times; an instance is the ``watch`` that the engine calls functions through."""

    def __init__(self) -> None:
        # Calls, seconds and bytes by module, class and way.
        self._known: dict[Any, list[Any]] = {}

    def __call__(
        self, module: Module | None, kind: type, way: str, function: Any, *given: Any
    ) -> Any:
        """Call a function, and add its time.

        Args:
            module: Where; ``None`` for the loss as a whole.
            kind: What: the class of an extension, or of a propagator.
            way: See :class:`Row`.
            function: The function.
            given: Its arguments.

        Returns:
            What it returns.
        """
        found = self._known.get((module, kind, way))
        if found is None:
            found = self._known[module, kind, way] = [0, 0.0, 0]
        if profiler_runs():
            label = f"backpack: {kind.__name__} at {_path(module)}"
            function = torch.profiler.record_function(label)(function)
        begin = perf_counter()
        try:
            result = function(*given)
        finally:
            found[0] += 1
            found[1] += perf_counter() - begin
        found[2] = _bytes(result)
        return result

    def summary(self, history: Mapping[str, int]) -> Summary:
        """The table, and what became of passes."""
        return Summary(self.rows(), history)

    def rows(self) -> Iterator[Row]:
        """The rows in the order in which they came up; the engine's own checks are one row."""
        visits, took = 0, 0.0
        for (module, kind, way), (calls, seconds, size) in self._known.items():
            if issubclass(kind, SumCheck):
                visits, took = visits + calls, took + seconds
            else:
                yield Row(_path(module), kind.__name__, way, calls, seconds, size)
        if visits:
            yield Row("all modules", "(checks of sums)", "check", visits, took, 0)


def _path(module: Module | None) -> str:
    return "the loss" if module is None else path_of(module)


def _bytes(value: Any) -> int:
    """Memory of the tensors in a value, its items, or its attributes."""
    if not isinstance(value, (list, tuple)):
        value = (value if isinstance(value, dict) else getattr(value, "blocks", {})).values()
    total = 0
    for part in value:
        total += part.nbytes if isinstance(part, Tensor) else _bytes(part)
    return total


class Summary:
    """A table of what a block took; printed, it is text.

    Attributes:
        rows: The rows, slowest first.
        passes: How many passes took a plan that was made before, made one, or could not, and why.
    """

    def __init__(self, rows: Iterable[Row], passes: Mapping[str, int] | None = None) -> None:
        self.rows = sorted(rows, key=lambda row: -row.seconds)
        self.passes = dict(passes or {})

    def columns(self) -> dict[str, list[Any]]:
        """The table by columns, as data frames take it."""
        return {name: [getattr(row, name) for row in self.rows] for name in Row._fields}

    def to_frame(self) -> Any:
        """The table as a ``pandas.DataFrame``; needs pandas."""
        import pandas  # type: ignore[import-untyped,unused-ignore]

        return pandas.DataFrame(self.columns())

    def __str__(self) -> str:
        """Aligned columns, slowest first, with the sum below."""
        total = sum(row.seconds for row in self.rows)
        lines = [("module", "extension", "way", "calls", "ms", "%", "KiB")]
        for row in self.rows:
            share = f"{100 * row.seconds / total:.0f}" if total else "0"
            size, took = f"{row.bytes / 1024:.1f}", f"{1000 * row.seconds:.2f}"
            lines.append((*row[:3], str(row.calls), took, share, size))
        lines.append(("all", "", "", "", f"{1000 * total:.2f}", "100", ""))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            [*map(str.ljust, line[:3], widths), *map(str.rjust, line[3:], widths[3:])]
            for line in lines
        ]
        text = ["  ".join(row).rstrip() for row in table]
        return "\n".join([*text, *[f"{n} {_passes(n)} {how}" for how, n in self.passes.items()]])

    __repr__ = __str__


def _passes(count: int) -> str:
    return "pass" if count == 1 else "passes"
