"""``python -m benchmarks.models [--only NAME ...] [--write docs/models.md]``."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import time
from pathlib import Path

import torch

from benchmarks.models import adapters, packages, plain, text, vision
from benchmarks.models.judge import QUANTITIES, Cell, judge_all
from benchmarks.models.page import page
from benchmarks.models.trial import Trial

FAMILIES = (plain, text, vision, adapters, packages)
TRIALS: list[Trial] = [trial for family in FAMILIES for trial in family.TRIALS]


def main() -> None:
    """Try all models, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="parts of names of models")
    parser.add_argument("--quantity", nargs="*", default=[*QUANTITIES], choices=[*QUANTITIES])
    parser.add_argument("--write", type=Path, help="where to write the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    wanted = [part.lower() for part in options.only or [""]]
    results: dict[str, dict[str, Cell]] = {}
    for trial in TRIALS:
        if not any(part in trial.name.lower() for part in wanted):
            continue
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            results[trial.name] = judge_all(trial, options.quantity)
        seconds = time.perf_counter() - start
        print(f"{trial.name} ({seconds:.0f} s)")
        for quantity, cell in results[trial.name].items():
            print(f"    {quantity}: {cell.reason or f'{cell.error:.0e}'}", flush=True)
    if options.write:
        options.write.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
