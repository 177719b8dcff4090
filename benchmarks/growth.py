"""How time and memory grow with samples, classes and depth: slopes in double logarithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import log
from typing import Any

from benchmarks.cells import measure
from benchmarks.problems import PROBLEMS, Problem, mlp
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
        slopes: ``d log time / d log value``, by least squares, for each peer.
    """

    axis: str
    quantity: str
    values: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)

    def __str__(self) -> str:
        """One line."""
        slopes = "  ".join(f"{peer} {slope:5.2f}" for peer, slope in self.slopes.items())
        return f"{self.quantity:16} against {self.axis:8} {self.values}: slope {slopes}"


def _with_classes(classes: int) -> Problem:
    return replace(PROBLEMS["mlp"], model=partial(mlp, classes=classes), classes=classes)


def _with_depth(depth: int) -> Problem:
    return replace(PROBLEMS["mlp"], model=partial(mlp, depth=depth))


# How to make the problem and the batch for a value on the axis.
_AXES: dict[str, tuple[Sequence[int], Callable[[int], tuple[Problem, int]]]] = {
    "samples": ((32, 64, 128, 256), lambda n: (PROBLEMS["2c2d"], n)),
    "classes": ((10, 20, 40, 80), lambda c: (_with_classes(c), 64)),
    "depth": ((1, 2, 3, 4, 5), lambda d: (_with_depth(d), 128)),
}


def study(
    names: Sequence[str], seconds: float, rate: float, clock: str = "wall"
) -> Iterator[Growth]:
    """Measure quantities along every axis.

    Args:
        names: Quantities.
        seconds: How long to repeat each point.
        rate: Bytes per second of a first write.
        clock: See :func:`benchmarks.measure.alternate`.

    Yields:
        One study for each quantity and axis.
    """
    for name in names:
        for axis, (values, make) in _AXES.items():
            growth = Growth(axis, name, list(values))
            for value in values:
                problem, batch = make(value)
                cell = measure(problem, QUANTITIES[name], PEERS, seconds, rate, clock, False, batch)
                for peer in PEERS:
                    time = cell.time.get(peer)
                    if time is not None:
                        growth.seconds.setdefault(peer, []).append(time * cell.gradient)
            for peer, times in growth.seconds.items():
                if len(times) == len(values):
                    growth.slopes[peer] = _slope(values, times)
            yield growth


def _slope(values: Sequence[float], times: Sequence[float]) -> float:
    x, y = [log(v) for v in values], [log(t) for t in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)
