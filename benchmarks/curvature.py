"""Curvature of a data set beside curvlinops: ``python -m benchmarks.curvature [problem ...]``.

Kronecker factors by a pass over a loader, and products with matrices over it. The numbers of both
are compared before time is taken. curvlinops has no exact diagonal of the generalised Gauss-Newton
matrix, and the matrix is known to both by products; so its diagonal is not here.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from operator import matmul
from typing import Any

import curvlinops
import torch
from torch import Tensor, nn

from backpack_core import extend
from backpack_core.extensions import EKFAC, KFAC, KFLR
from backpack_data import accumulate
from backpack_secondorder.blocks import BlockDiagonal
from backpack_secondorder.curvlinops import from_curvlinops
from backpack_secondorder.over_data import GGN, Fisher, Hessian
from benchmarks.measure import CLOCKS, alternate
from benchmarks.problems import Problem, find

Data = list[tuple[Tensor, Tensor]]
Cell = tuple[Callable[[], Any], Callable[[], Any]]  # ours, theirs
Cells = dict[str, Cell]
SEPARATE = {"separate_weight_and_bias": True, "kfac_approx": "reduce"}


def loader_of(problem: Problem, batches: int, batch: int) -> Data:
    """Batches of one size, and a smaller last one."""
    x, y = problem.data(batch * batches - batch // 2)
    return [*zip(x.split(batch), y.split(batch), strict=True)]


def factors_over(model: nn.Module, lossfunc: nn.Module, data: Data, extension: Any) -> Any:
    """The matrices of all batches, in as many passes as they take.

    Alignment is not measured: that happens in the passes 1, 2, 4, 8, …, and there are few here.
    """
    found = accumulate(model, lossfunc, data, extension, progress=False, check="never")
    return BlockDiagonal(found.field(extension.savefield))


def cells(problem: Problem, batches: int, batch: int) -> Cells:
    """What is compared, on one problem."""
    torch.manual_seed(0)
    model, lossfunc = problem.model(), nn.CrossEntropyLoss()
    data = loader_of(problem, batches, batch)
    plain = copy.deepcopy(model)  # curvlinops gets one without our hooks
    extend(model), extend(lossfunc)
    plain_loss, trained = nn.CrossEntropyLoss(), [*plain.parameters()]
    size = sum(p.numel() for p in trained)
    vector, matrix = torch.randn(size), torch.randn(size, 4)
    settings = {"check_deterministic": False, "num_data": sum(len(x) for x, _ in data)}

    def theirs(kind: str, **more: Any) -> Any:
        return getattr(curvlinops, kind)(plain, plain_loss, trained, data, **settings, **more)

    made = {
        f"{name} @ {form}": (partial(matmul, mine, vectors), partial(matmul, other, vectors))
        for name, mine, other in (
            ("GGN", GGN(model, lossfunc, data), theirs("GGNLinearOperator")),
            ("Hessian", Hessian(model, lossfunc, data), theirs("HessianLinearOperator")),
            (
                "empirical Fisher",
                Fisher(model, lossfunc, data, kind="empirical"),
                theirs("EFLinearOperator"),
            ),
        )
        for form, vectors in (("vector", vector), ("4 vectors", matrix))
    }
    return factored(model, lossfunc, data, theirs, plain) | made


def factored(model: nn.Module, lossfunc: nn.Module, data: Data, theirs: Any, plain: Any) -> Cells:
    """Those that are Kronecker-factored."""

    def kfac(fisher: str, kind: str = "KFACLinearOperator") -> Any:
        more = {"fisher_type": fisher, "num_per_example_loss_terms": 1, **SEPARATE}
        return from_curvlinops(theirs(kind, **more), plain)

    return {
        "KFAC, exact": (
            lambda: factors_over(model, lossfunc, data, KFLR("reduce")),
            lambda: kfac("type-2"),
        ),
        "KFAC, sampled": (
            lambda: factors_over(model, lossfunc, data, KFAC(1, "reduce")),
            lambda: kfac("mc"),
        ),
        "EKFAC, exact": (
            lambda: factors_over(model, lossfunc, data, EKFAC(None, "reduce")),
            lambda: kfac("type-2", "EKFACLinearOperator"),
        ),
    }


def difference(name: str, mine: Any, other: Any) -> str:
    """Relative distance of the numbers; of sampled ones there is none."""
    if "sampled" in name:
        return "drawn"
    if isinstance(mine, BlockDiagonal):
        vector = torch.ones(mine.shape[0])
        mine, other = mine @ vector, other @ vector
    return f"{float((mine - other).norm() / other.norm()):.0e}"


def main() -> None:
    """Compare numbers, take times, print a row for each cell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curvature", description=__doc__)
    parser.add_argument("problems", nargs="*", default=["mlp", "3c3d"])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each cell")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--batch", type=int, default=None, help="default: the problem's")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    row = "{:12} {:26} {:>10} {:>14} {:>7} {:>11}".format
    print(row("problem", "quantity", "ours (ms)", "curvlinops", "ratio", "difference"))
    for name in options.problems:
        problem = find(name)
        found = cells(problem, options.batches, options.batch or problem.exact_batch)
        for cell, (ours, theirs) in found.items():
            if options.only not in cell:
                continue
            distance = difference(cell, ours(), theirs())
            steps = {"ours": ours, "theirs": theirs}
            times = alternate(steps, options.seconds, options.clock, lambda side: None, before=1)
            best = [f"{1e3 * times.best(side):.1f}" for side in steps]
            ratio = f"{times.ratio('ours', 'theirs'):.2f}"
            print(row(name, cell, *best, ratio, distance), flush=True)


if __name__ == "__main__":
    main()
