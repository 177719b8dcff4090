"""The comparison as one command: ``python -m benchmarks``, see ``--help``."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.cells import Cell, measure
from benchmarks.growth import Growth, study
from benchmarks.measure import CLOCKS
from benchmarks.peers import PEERS
from benchmarks.problems import PROBLEMS
from benchmarks.quantities import QUANTITIES

_PARTS = ("problem", "quantity", "peer", "no_memory", "growth")  # a choice of what is measured


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    peers = [name for name in PEERS if name not in {"gradient", "ours"}]
    add = parser.add_argument
    add("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="default: all")
    add("--quantity", nargs="+", choices=QUANTITIES, default=list(QUANTITIES), help="default: all")
    add("--peer", nargs="*", choices=peers, default=peers, help="default: all")
    add("--seconds", type=float, default=5.0, help="how long to repeat a cell (default: 5)")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    add("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    add("--no-memory", action="store_true", help="measure time only")
    add("--summary", action="store_true", help="sum up the results file, measure nothing")
    add("--growth", nargs="*", choices=QUANTITIES, help="study the growth of these quantities")
    add("--output", type=Path, help="folder of the results (default: none for a part of them)")
    options = parser.parse_args()
    is_part = any(getattr(options, name) != parser.get_default(name) for name in _PARTS)
    if options.output is None and (options.summary or not is_part):
        options.output = Path("benchmarks/results")
    return options


def main() -> None:
    """Measure, print a line for each cell, and write ``results.json`` and ``results.png``.

    A run over a part leaves the stored results alone, unless ``--output`` names a folder.
    """
    options = _arguments()
    torch.set_num_threads(options.threads)
    # Peers that use full-backward hooks warn at the first layer of every net.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="There is a performance drop")  # of torch.func
    output: Path | None = options.output
    if options.summary:
        known = report.load(options.output / "results.json")
        print("\n".join([report.header(), *map(report.row, known), report.summary(known)]))
        return
    print(f"threads: {options.threads}")
    cells: list[Cell] = []
    growth: list[Growth] = []
    if options.growth is None:
        print(report.header())
        for problem in options.problem:
            for quantity in options.quantity:
                cell = measure(
                    PROBLEMS[problem],
                    QUANTITIES[quantity],
                    ["ours", *options.peer],
                    options.seconds,
                    options.clock,
                    memory=not options.no_memory,
                )
                cells.append(cell)
                print(report.row(cell), flush=True)
                _store(output, cells, growth)
        print(report.summary(cells))
        if output is not None:
            report.plot(output / "results.png", report.load(output / "results.json"))
    else:
        for found in study(
            options.growth or ["BatchGrad", "DiagGGNExact"], options.seconds, options.clock
        ):
            growth.append(found)
            print(found, flush=True)
        _store(output, cells, growth)


def _store(output: Path | None, cells: list[Cell], growth: list[Growth]) -> None:
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        report.save(output / "results.json", cells, growth)


if __name__ == "__main__":
    main()
