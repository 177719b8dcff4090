"""Results as a table, a file and a plot."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.cells import Cell
from benchmarks.growth import Growth
from benchmarks.problems import PROBLEMS
from benchmarks.quantities import QUANTITIES

_HEADER = (
    f"{'problem':12}{'quantity':18}{'N':>4} |{'gradient':>9} |"
    f"{'limit':>7}{'ours':>8}{'ours/lim':>9} |{'incumb.':>8}{'t.func':>8}{'opacus':>8} |"
    f"{'MB ours':>9}{'incumb.':>9}{'t.func':>9} |{'differ':>8}"
)


def header() -> str:
    """Two lines that explain the columns."""
    return (
        "gradient in ms; limit and ours relative to it; peers relative to ours (above 1: ours is "
        "faster); MB at the peak above a plain gradient\n" + _HEADER
    )


def row(cell: Cell) -> str:
    """One line of the table."""
    ours = cell.time.get("ours")
    distance = ours / cell.limit if ours and cell.limit else None
    peers = "".join(_number(cell.to_ours.get(p), 8) for p in ("incumbent", "torch.func", "opacus"))
    memory = "".join(
        _number(_mega(cell.memory.get(p)), 9, 1) for p in ("ours", "incumbent", "torch.func")
    )
    if "all" in cell.refused:
        return (
            f"{cell.problem:12}{cell.quantity:18}{cell.batch:>4} | left out: {cell.refused['all']}"
        )
    difference = "" if cell.difference is None else f"{cell.difference:.0e}"
    return (
        f"{cell.problem:12}{cell.quantity:18}{cell.batch:>4} |{1e3 * cell.gradient:>9.1f} |"
        f"{_number(cell.limit, 7)}{_number(ours, 8)}{_number(distance, 9)} |{peers} |{memory} |"
        f"{difference:>8}"
    )


def summary(cells: Sequence[Cell], least: float = 5e-3) -> str:
    """Geometric means over cells that take us longer than ``least`` seconds, and the worst cells.

    Args:
        cells: What was measured.
        least: Shorter cells say more about calls of Python than about products.
    """
    long = [c for c in cells if c.time.get("ours", 0.0) * c.gradient > least]
    lines = [f"{len(long)} cells above {1e3 * least:.0f} ms, geometric means:"]
    for peer in ("incumbent", "torch.func", "opacus"):
        ratios = {_name(c): c.to_ours[peer] for c in long if peer in c.to_ours}
        slower = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio < 1]
        if ratios:
            lines.append(
                f"  {peer} / ours: {geometric_mean(ratios.values()):.2f} over {len(ratios)} cells; "
                f"faster than ours: {', '.join(slower) or 'nowhere'}"
            )
    distances = {_name(c): c.time["ours"] / c.limit for c in long if c.limit}
    if distances:
        far = [f"{name} {ratio:.2f}" for name, ratio in distances.items() if ratio > 1.4]
        lines.append(
            f"  ours / limit: {geometric_mean(distances.values()):.2f} over {len(distances)} "
            f"cells; above 1.4: {', '.join(far) or 'nowhere'}"
        )
    return "\n".join(lines)


def _name(cell: Cell) -> str:
    return f"{cell.problem} {cell.quantity}"


def _number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def _mega(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def save(path: Path, cells: Sequence[Cell], growth: Sequence[Growth]) -> None:
    """Write to one JSON file; what is there already stays, unless it was measured anew."""
    before = json.loads(path.read_text()) if path.exists() else {}
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cells": _merged(before.get("cells", []), cells, "problem", "quantity"),
        "growth": _merged(before.get("growth", []), growth, "axis", "quantity"),
    }
    path.write_text(json.dumps(result, indent=1))


def load(path: Path) -> list[Cell]:
    """The cells of a results file, in the order of the tables."""
    cells = [Cell(**cell) for cell in json.loads(path.read_text())["cells"]]
    problems, quantities = list(PROBLEMS), list(QUANTITIES)
    return sorted(cells, key=lambda c: (problems.index(c.problem), quantities.index(c.quantity)))


def _merged(
    before: list[dict[str, Any]], found: Sequence[Cell | Growth], *key: str
) -> list[dict[str, Any]]:
    new = {tuple(entry[k] for k in key): entry for entry in (f.as_dict() for f in found)}
    return [e for e in before if tuple(e[k] for k in key) not in new] + list(new.values())


def plot(path: Path, cells: Sequence[Cell]) -> None:
    """Time of every peer relative to the gradient, one panel for each problem."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    problems = list(dict.fromkeys(cell.problem for cell in cells))
    figure, panels = pyplot.subplots(
        1, len(problems), figsize=(3.5 * len(problems), 5), squeeze=False, sharey=False
    )
    for panel, name in zip(panels[0], problems, strict=True):
        chosen = [cell for cell in cells if cell.problem == name][::-1]
        names = [f"{cell.quantity} ({cell.batch})" for cell in chosen]
        peers = ["opacus", "torch.func", "incumbent", "ours"]
        height = 0.8 / len(peers)
        for shift, peer in enumerate(peers):
            at = [y + shift * height for y in range(len(chosen))]
            panel.barh(at, [c.time.get(peer, 0) for c in chosen], height, label=peer)
        for y, cell in enumerate(chosen):
            if cell.limit is not None:
                panel.plot([cell.limit] * 2, [y - height / 2, y + 3.5 * height], "k-")
        panel.set_yticks([y + 1.5 * height for y in range(len(chosen))], names, fontsize=7)
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_title(name)
        panel.set_xlabel("time / gradient (bar: least)")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
