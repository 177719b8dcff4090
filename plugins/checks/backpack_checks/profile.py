"""Measures the time of a block, by module and extension.

The clock is read twice for each value that is computed and each quantity that is sent. While the
profiler of torch runs, each of them also gets a label in its trace.
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
    """The time of one extension at one module.

    Attributes:
        module: Path of the module.
        extension: Name of the extension, or of the propagator that sent a quantity on.
        way: ``"rule"``, ``"autodiff"`` (if any parameter needs it), ``"graph"`` (from the graph of
            the loss), ``"sent"``, or ``"check"`` (a measurement in the first passes of a
            structure).
        calls: The number of calls, with one for each chunk of columns and each pass; the parameters
            of a module are read together.
        seconds: The time. On an accelerator, the time to start kernels: use a profiler there.
        bytes: The size of the last result.
    """

    module: str
    extension: str
    way: str
    calls: int
    seconds: float
    bytes: int


class Profile:
    """Adds up times. An instance is the ``watch`` through which the engine calls functions."""

    def __init__(self) -> None:
        # [calls, seconds, bytes] by module, class and way.
        self._entries: dict[Any, list[Any]] = {}

    def __call__(
        self, module: Module | None, kind: type, way: str, function: Any, *given: Any
    ) -> Any:
        """Call a function, and add its time.

        Args:
            module: The module; ``None`` for the loss as a whole.
            kind: The class of the extension or propagator.
            way: See :class:`Row`.
            function: The function.
            given: Its arguments.

        Returns:
            The result of the function.
        """
        entry = self._entries.setdefault((module, kind, way), [0, 0.0, 0])
        if profiler_runs():
            label = f"backpack: {kind.__name__} at {_path(module)}"
            function = torch.profiler.record_function(label)(function)
        begin = perf_counter()
        try:
            result = function(*given)
        finally:
            entry[0] += 1
            entry[1] += perf_counter() - begin
        entry[2] = _bytes(result)
        return result

    def summary(self, history: Mapping[str, int]) -> Summary:
        """The table, and how many passes used a plan."""
        return Summary(self.rows(), history)

    def rows(self) -> Iterator[Row]:
        """Yields the rows in the order of their first calls; all checks of sums are one row."""
        visits, took = 0, 0.0
        for (module, kind, way), (calls, seconds, size) in self._entries.items():
            if issubclass(kind, SumCheck):
                visits, took = visits + calls, took + seconds
            else:
                yield Row(_path(module), kind.__name__, way, calls, seconds, size)
        if visits:
            yield Row("all modules", "(checks of sums)", "check", visits, took, 0)


def _path(module: Module | None) -> str:
    return "the loss" if module is None else path_of(module)


def _bytes(value: Any) -> int:
    """The bytes of the tensors in a value, in its items or in its blocks."""
    if not isinstance(value, (list, tuple)):
        value = (value if isinstance(value, dict) else getattr(value, "blocks", {})).values()
    total = 0
    for part in value:
        total += part.nbytes if isinstance(part, Tensor) else _bytes(part)
    return total


class Summary:
    """A table of the times of a block, with a text form.

    Attributes:
        rows: The rows, slowest first.
        passes: How many passes used a plan, made one, or could not make one, and why.
    """

    def __init__(self, rows: Iterable[Row], passes: Mapping[str, int] | None = None) -> None:
        self.rows = sorted(rows, key=lambda row: -row.seconds)
        self.passes = dict(passes or {})

    def columns(self) -> dict[str, list[Any]]:
        """The table as a dictionary of columns, for data frames."""
        return {name: [getattr(row, name) for row in self.rows] for name in Row._fields}

    def to_frame(self) -> Any:
        """The table as a ``pandas.DataFrame``; requires pandas."""
        import pandas  # type: ignore[import-untyped,unused-ignore]

        return pandas.DataFrame(self.columns())

    def __str__(self) -> str:
        """The table as text with aligned columns, slowest first, and the sum below."""
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
