"""What quantities cost beside a plain pass: ``python -m benchmarks.gradient``.

A line for each problem and quantity: the time of a forward and a backward pass with the quantity,
relative to a plain one, for every ``gradient=`` of ``backpack(...)``. Runs alternate in one
process. ``writing`` is the first write of the results to fresh memory, in plain passes, which no
implementation does without.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

from backpack_core import backpack, extend, extensions
from backpack_core.engine.active import Gradient
from benchmarks.limit import limit
from benchmarks.measure import CLOCKS, alternate, write_rate
from benchmarks.peers import Step
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.quantities import QUANTITIES, Quantity

MODES: tuple[Gradient, ...] = ("autograd", "shared", "none")
_DEFAULT = ("BatchGrad", "SumGradSquared", "Variance", "FirstFour", "BatchL2Grad", "ClippedSumGrad")


def steps(problem: Problem, quantity: Quantity) -> tuple[dict[str, Step], dict[str, nn.Module]]:
    """A plain pass, one of an extended model, and one for every mode, all of them warm."""
    found: dict[str, Step] = {}
    models: dict[str, nn.Module] = {}
    x, y = problem.data(problem.batch)
    for name in ("plain", "extended", *MODES):
        torch.manual_seed(0)
        model, lossfunc = problem.model(), nn.CrossEntropyLoss()
        if name != "plain":
            model, lossfunc = extend(model), extend(lossfunc)
        step = partial(_step, name, model, lossfunc, x, y, quantity)
        for _ in range(3 if name in MODES else 1):  # what is shared is judged first
            step()
        found[name], models[name] = step, model
    return found, models


def _step(
    name: str, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor, quantity: Quantity
) -> None:
    model.zero_grad()
    loss = lossfunc(model(x), y)
    if name not in MODES:
        loss.backward()
        return
    asked = [getattr(extensions, kind)(*quantity.arguments) for kind in quantity.extensions]
    with backpack(*asked, gradient=name):
        loss.backward()


def line(problem: Problem, quantity: Quantity, seconds: float, clock: str) -> str:
    """Measure one line."""
    found, models = steps(problem, quantity)

    def forget(name: str) -> None:
        for parameter in models[name].parameters():
            for field in quantity.fields:
                parameter.__dict__.pop(field, None)

    times = alternate(found, seconds, clock, forget, least=3)
    plain = times.best("plain")
    ratios = "".join(f"{times.ratio(name, 'plain'):>10.2f}" for name in ("extended", *MODES))
    bound = limit(problem, quantity, problem.batch)
    size = 0 if bound is None else bound.result_bytes
    writing = size / write_rate(clock) / plain if size > 2**25 else 0.0
    return (
        f"{problem.name:14}{quantity.name:16}{problem.batch:>4}{plain * 1e3:>10.1f}"
        f"{ratios}{writing:>10.2f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient", description=__doc__)
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--quantity", nargs="+", choices=QUANTITIES, default=list(_DEFAULT))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    columns = "".join(f"{name:>10}" for name in ("extended", *MODES, "writing"))
    print(f"{'problem':14}{'quantity':16}{'N':>4}{'plain ms':>10}{columns}")
    for problem in options.problem:
        for quantity in options.quantity:
            found = line(PROBLEMS[problem], QUANTITIES[quantity], options.seconds, options.clock)
            print(found, flush=True)


if __name__ == "__main__":
    main()
