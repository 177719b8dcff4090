"""How time and memory grow with samples, classes and depth: slopes in double logarithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log
from typing import Any

from benchmarks.cells import measure
from benchmarks.problems import find
from benchmarks.quantities import QUANTITIES

PEERS = ("ours", "incumbent")


@dataclass
class Growth:
    """A quantity along one axis.

    Attributes:
        axis: What grows: ``"samples"``, ``"classes"``, or ``"depth"``.
        quantity: Its name.
        values: Along the axis.
        seconds: For each peer.
        memory: Bytes above a plain gradient, for each peer.
        slopes: ``d log time / d log value``, by least squares, for each peer.
        memory_slopes: The same for memory.
    """

    axis: str
    quantity: str
    values: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)
    memory_slopes: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)

    def __str__(self) -> str:
        """One line."""
        time, memory = (
            ", ".join(f"{peer} {slope:.2f}" for peer, slope in slopes.items())
            for slopes in (self.slopes, self.memory_slopes)
        )
        return f"{self.quantity:14} {self.axis:8} {self.values}: time {time}; memory {memory}"


# Problems and batch sizes along an axis.
_AXES: dict[str, tuple[Sequence[int], Callable[[int], tuple[str, int]]]] = {
    "samples": ((16, 32, 64, 128), lambda n: ("2c2d", n)),
    "classes": ((10, 20, 40, 80), lambda c: (f"mlp/classes={c}", 64)),
    "depth": ((4, 8, 16, 32), lambda d: (f"mlp/depth={d}", 64)),
}


def study(names: Sequence[str], seconds: float, clock: str = "wall") -> Iterator[Growth]:
    """Measure quantities along every axis.

    Args:
        names: Quantities.
        seconds: How long to repeat each point.
        clock: See :func:`benchmarks.measure.alternate`.

    Yields:
        One study for each quantity and axis.
    """
    peers = [peer for peer in PEERS if peer != "gradient"]
    for name in names:
        for axis, (values, make) in _AXES.items():
            growth = Growth(axis, name, list(values))
            for value in values:
                problem, batch = make(value)
                cell = measure(find(problem), QUANTITIES[name], peers, seconds, clock, batch=batch)
                for peer, time in cell.time.items():
                    growth.seconds.setdefault(peer, []).append(time * cell.gradient)
                for peer, size in cell.memory.items():
                    growth.memory.setdefault(peer, []).append(size)
            growth.slopes = _slopes(values, growth.seconds)
            growth.memory_slopes = _slopes(values, growth.memory)
            yield growth


def _slopes(values: Sequence[int], found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """For the peers that were measured everywhere."""
    return {
        peer: _slope(values, numbers)
        for peer, numbers in found.items()
        if len(numbers) == len(values) and min(numbers) > 0
    }


def _slope(values: Sequence[float], times: Sequence[float]) -> float:
    x, y = [log(v) for v in values], [log(t) for t in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)
