"""Draws ``docs/_static/benchmark.svg`` from the results of the last ``make bench``.

Run ``python docs/make_benchmark_picture.py`` after measuring.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
PEERS = {
    "ours": ("this library", "#0b6e63"),
    "incumbent": ("BackPACK", "#c2571a"),
    "torch.func": ("torch.func", "#8d8d8d"),
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


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """One panel for each net, one group of bars for each quantity."""
    by_name = {(cell["problem"], cell["quantity"]): cell for cell in cells}
    figure, axes = plt.subplots(1, len(NETS), figsize=(9, 3.1), sharey=True, layout="constrained")
    for axis, (net, title) in zip(axes, NETS.items(), strict=True):
        for place, (peer, (label, colour)) in enumerate(PEERS.items()):
            times = [by_name[net, name]["time"].get(peer, float("nan")) for name in QUANTITIES]
            places = [row + 0.27 * (place - 1) for row in range(len(QUANTITIES))]
            axis.barh(places, times, 0.25, label=label, color=colour)
        axis.axvline(1, color="black", lw=0.8)
        axis.set(title=title, xscale="log", xlabel="time / plain backward pass")
        ticks = [1, 2, 5, 10, 20, 50] if net == "2c2d" else [1, 2, 5, 10, 20]
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(QUANTITIES)), QUANTITIES.values())
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False, loc="upper right", fontsize=8)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "benchmark"
    results = json.loads((ROOT / "benchmarks" / "results" / "results.json").read_text("utf-8"))
    draw(results["cells"], ROOT / "docs" / "_static" / "benchmark.svg")
