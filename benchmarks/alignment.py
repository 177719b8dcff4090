"""What it costs to measure alignment: ``python -m benchmarks.alignment [problem ...]``.

Individual gradients, forward and backward pass, side by side in one run: never measured, measured
in every pass, and as it is by default, once a structure is trusted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from benchmarks.measure import CLOCKS, Times, alternate
from benchmarks.problems import PROBLEMS, Problem, find

CHECKS = ("never", "always", "first")
TRUSTED = 129  # as many passes as make the next measured one come far behind


def measure(problem: Problem, seconds: float, clock: str) -> Times:
    """Time all three on one problem."""
    x, y = problem.data(problem.batch)
    models = {check: extend(problem.model()) for check in CHECKS}
    steps = {check: partial(_step, models[check], x, y, check) for check in CHECKS}
    for check, step in steps.items():
        for _ in range(1 if check != "first" else 3):
            step()
    return alternate(steps, seconds, clock, lambda check: _forget(models[check]), most=TRUSTED)


def _step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, check: str) -> None:
    _forget(model)
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    with backpack(BatchGrad(), check=check):  # type: ignore[arg-type]
        loss.backward()


def _forget(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
        parameter.__dict__.pop("grad_batch", None)


def main() -> None:
    """Measure and print the ratios to a pass that measures nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alignment", description=__doc__)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--seconds", type=float, default=5.0, help="for each problem")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.manual_seed(0)
    report: Callable[..., str] = "{:12} {:>12} {:>10} {:>10}".format
    print(report("problem", "never (ms)", "always", "first"))
    for name in options.problems:
        times = measure(find(name), options.seconds, options.clock)
        ratios = (f"{times.ratio(check, 'never'):.2f}" for check in CHECKS[1:])
        print(report(name, f"{1e3 * times.best('never'):.2f}", *ratios))


if __name__ == "__main__":
    main()
