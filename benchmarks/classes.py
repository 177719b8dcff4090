"""Many classes: ``python -m benchmarks.classes``, CPU time of one thread, the least of some rounds.

First, ``DiagGGNExact`` and ``KFLR`` with columns condensed behind the head, with all of them, and
with all of them but a tolerance, relative to a plain pass. Then, for single layers, diagonals by
products and by pairs of positions. Last, draws of one class for each of some rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import KFLR, DiagGGNExact
from backpack_layers.categorical import drawn
from backpack_products import contractions
from backpack_products.affine import AffineProduct
from backpack_secondorder import condensed, position_pairs
from benchmarks.problems import PROBLEMS

# Columns, samples, positions, features, inputs of a layer.
LAYERS = [
    (99, 2, 16, 512, 4608), (25, 2, 16, 512, 4608), (12, 2, 16, 512, 4608),
    (99, 2, 64, 256, 2304), (50, 2, 64, 256, 2304), (99, 4, 36, 192, 1728),
    (33, 4, 36, 192, 1728), (99, 8, 36, 192, 192), (99, 2, 64, 128, 128),
]  # fmt: skip
# Rows, classes.
DRAWS = [(128, 10), (128, 1000), (512, 50257)]


def least(step: Callable[[], Any], rounds: int) -> float:
    """Milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def columns(name: str, rounds: int) -> None:
    """Print a line for each quantity on a problem."""
    problem = PROBLEMS[name]
    torch.manual_seed(0)
    x, y = problem.data(problem.exact_batch)
    model, lossfunc = problem.model(), nn.CrossEntropyLoss()

    def plain() -> None:
        lossfunc(model(x), y).backward()

    plain()
    base = least(plain, rounds)
    extend(model), extend(lossfunc)
    for kind in (DiagGGNExact, KFLR):
        found = []
        for share, tolerance in ((condensed.WORTHWHILE, 0.0), (0.0, 0.0), (0.0, 0.1)):

            def step(tolerance: float = tolerance, kind: Any = kind) -> None:
                loss = lossfunc(model(x), y)
                with backpack(kind(tolerance=tolerance), check="never"):
                    loss.backward()

            kept, condensed.WORTHWHILE = condensed.WORTHWHILE, share
            found.append(least(step, rounds) / base)
            condensed.WORTHWHILE = kept
        numbers = "".join(f"{number:10.1f}" for number in found)
        print(f"{name:10}{kind.__name__:14}{len(x):3}{base:10.1f}{numbers}", flush=True)


@torch.no_grad()
def pairs(layer: tuple[int, ...], rounds: int) -> None:
    """Print a line for a layer."""
    count, samples, positions, features, size = layer
    out = torch.randn(count, samples, positions, 1, features)
    inp = torch.randn(samples, positions, 1, size)
    by_products = least(lambda: contractions.square_sum(out, inp), rounds)
    by_pairs = least(lambda: position_pairs.by_pairs(out, inp), rounds)
    product = AffineProduct(out, inp, torch.Size((features, size)))
    chosen = "pairs" if position_pairs.is_cheaper(product) else "products"
    shape = "".join(f"{number:6}" for number in layer)
    print(f"{shape}{by_products:10.1f}{by_pairs:10.1f}  {chosen}", flush=True)


def draws(shape: tuple[int, int], rounds: int) -> None:
    """Print a line for the number of rows and of classes."""
    p = torch.randn(shape).softmax(1)
    by_torch = least(lambda: torch.multinomial(p, 1, replacement=True), rounds)
    by_inversion = least(lambda: drawn(p, 1), rounds)
    print(f"{shape[0]:6}{shape[1]:7}{by_torch:12.3f}{by_inversion:12.3f}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.classes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often to measure (default: 3)")
    names = ["3c3d-100", "3c3d-1000", "vit-100", "vit-1000"]
    parser.add_argument("--problem", nargs="*", default=names, choices=names, help="default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("problem   quantity        N  plain ms condensed      all  tol=0.1")
    for name in options.problem:
        columns(name, options.rounds)
    print("     V     N     S     O     I  products     pairs  chosen")
    for layer in LAYERS:
        pairs(layer, options.rounds)
    print("  rows      C multinomial   inversion  (ms)")
    for shape in DRAWS:
        draws(shape, options.rounds)


if __name__ == "__main__":
    main()
