"""Draws the pictures of ``docs/performance.md`` into ``docs/_static``.

One is drawn from the results of the last ``make bench``, the others from the tables of the page.
Run ``python docs/make_benchmark_picture.py`` after measuring.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "docs" / "_static"
OURS, PEER, OTHER, LIGHT = "#0b6e63", "#c2571a", "#8d8d8d", "#5cc8b8"
PEERS = {
    "ours": ("this library", OURS),
    "incumbent": ("BackPACK", PEER),
    "torch.func": ("torch.func", OTHER),
}
QUANTITIES = {
    "BatchGrad": "individual gradients",
    "Variance": "their variance",
    "FirstFour": "four of them at once",
    "DiagGGNExact": "exact GGN diagonal",
    "KFAC": "Kronecker factors",
}
NETS = {
    "2c2d": "2C2D, 64 digits",
    "3c3d": "3C3D, 64 images",
    "transformer": "Transformer, 16 texts",
}
LONGEST = 10  # plain passes; a longer bar is cut, and says its length
FIRST_ORDER = {
    '"autograd"': ('gradient="autograd"', LIGHT),
    '"shared"': ('gradient="shared"', OURS),
    "vmap": ("vmap(grad)", OTHER),
    "Opacus": ("Opacus, hooks", PEER),
}
CAPTURED = {
    "engine": ("engine", LIGHT),
    "captured": ("captured", OURS),
    "vmap(grad)": ("vmap(grad)", OTHER),
}


def table(first: str) -> list[dict[str, str]]:
    """The rows of the page's table whose first column this is; an empty cell repeats the last."""
    page = (ROOT / "docs" / "performance.md").read_text("utf-8").replace("`", "")
    lines = re.findall(rf"^\| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)[0].splitlines()
    head = re.findall(rf"^(\| {first} \|.*)$", page, re.M)[0]
    columns, rows = [c.strip() for c in head.split("|")[1:-1]], []
    for line in lines:
        cells = [c.strip() for c in line.split("|")[1:-1]]
        cells[0] = cells[0] or rows[-1][columns[0]]
        rows.append(dict(zip(columns, cells, strict=True)))
    return rows


def bars(axis: Axes, names: list[str], series: list[tuple[str, str, list[float]]]) -> None:
    """One group of bars for each name; a line at the time of a plain pass."""
    height = 0.8 / len(series)
    for place, (label, colour, times) in enumerate(series):
        places = [row + height * (place - (len(series) - 1) / 2) for row in range(len(names))]
        axis.barh(places, times, 0.93 * height, label=label, color=colour)
    axis.axvline(1, color="black", lw=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)


def draw(cells: list[dict[str, Any]]) -> None:
    """Beside other libraries: one panel for each net, one group of bars for each quantity."""
    by_name = {(cell["problem"], cell["quantity"]): cell["time"] for cell in cells}
    figure, axes = plt.subplots(1, len(NETS), figsize=(9, 3.1), sharey=True, layout="constrained")
    for axis, (net, title) in zip(axes, NETS.items(), strict=True):
        series = [
            (label, colour, [by_name[net, q].get(peer, float("nan")) for q in QUANTITIES])
            for peer, (label, colour) in PEERS.items()
        ]
        bars(axis, list(QUANTITIES.values()), series)
        ticks = [1, 2, 5, 10, 20, 50] if net == "2c2d" else [1, 2, 5, 10, 20]
        axis.set(title=title, xscale="log", xlabel="time / plain backward pass")
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False, loc="upper right", fontsize=8)
    save(figure, "benchmark")


def draw_table(
    first: str, kinds: dict[str, tuple[str, str]], quantities: list[str], name: str
) -> None:
    """One panel for each quantity, one group of bars for each net."""
    rows = table(first)
    size = (4.5 * len(quantities), 4)
    figure, axes = plt.subplots(1, len(quantities), figsize=size, sharey=True, layout="constrained")
    for axis, quantity in zip(axes, quantities, strict=True):
        chosen = [row for row in rows if row["quantity"] == quantity]
        series = [
            (label, colour, [number(row[kind]) for row in chosen])
            for kind, (label, colour) in kinds.items()
        ]
        bars(axis, [row[first] for row in chosen], series)
        axis.set(title=quantity, xlabel="time / plain forward and backward pass")
        axis.set_xlim(0, min(LONGEST, axis.get_xlim()[1]))
        for bar in axis.patches:
            if bar.get_width() > LONGEST:
                words = {"ha": "right", "va": "center", "color": "white", "fontsize": 8}
                middle = bar.get_y() + bar.get_height() / 2
                axis.text(LONGEST, middle, f"{bar.get_width():g} ", **words)
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    save(figure, name)


def number(cell: str) -> float:
    """What a cell holds, if it is a number."""
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def save(figure: Any, name: str) -> None:
    """The same bytes for the same numbers."""
    figure.savefig(STATIC / f"{name}.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "benchmark"
    results = json.loads((ROOT / "benchmarks" / "results" / "results.json").read_text("utf-8"))
    draw(results["cells"])
    draw_table("problem, samples", FIRST_ORDER, ["BatchGrad", "Variance"], "first_order")
    draw_table("net, samples", CAPTURED, ["BatchGrad", "KFAC"], "captured")
