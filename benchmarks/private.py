"""Private training beside Opacus and ``vmap(grad)``: ``python -m benchmarks.private``.

First, whether it is the same: the largest difference of any entry of a parameter after ten steps
without noise in single precision, from Opacus with hooks and with ghost clipping, flat and with a
bound for each parameter; and the epsilons of both. Then what it costs: a forward and a backward
pass up to the clipped sums, relative to a plain pass, all alternating in one process. With
``--memory``, what such a pass takes at its peak beside a plain one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import ssl
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backpack_capture import capture
from backpack_core import backpack, extend
from backpack_privacy import Accountant, Clipping, Private, make_private
from backpack_privacy.randomness import SUMMED, source
from benchmarks.measure import CLOCKS, SETTLED, alternate, forget, freeing, growth
from benchmarks.peers import FIRST_ORDER, Step
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.quantities import QUANTITIES

BOUND, RATE, STEPS, EPSILON_STEPS = 0.5, 0.1, 10, 1000
RECORDED = 40  # passes after which a captured step is rarely compared with the engine
KINDS: dict[str, Any] = {"flat": "flat", "for each parameter": "per_parameter"}
# Ghost clipping of Opacus has no bounds for single parameters.
WAYS = (("hooks", "flat"), ("ghost", "flat"), ("hooks", "for each parameter"))


def private_of(problem: Problem, batch: int, kind: str) -> tuple[Private, Tensor, Tensor]:
    """Private training on one batch, and its data."""
    model, (x, y) = problem.net(), problem.data(batch)
    private = make_private(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=RATE),
        DataLoader(TensorDataset(x, y), batch_size=batch),
        noise_multiplier=0.0,
        clipping=Clipping(BOUND, KINDS[kind]),
        sampling="shuffled",  # each sample in each batch
        checks=0,
    )
    return private, x, y


def ours(problem: Problem, batch: int, kind: str) -> list[Tensor]:
    """The parameters after some steps."""
    private, _, _ = private_of(problem, batch, kind)
    for _ in range(STEPS):
        for x, y in private.loader:
            private.step(private.lossfunc(private.model(x), y))
    return [p.detach() for p in private.model.parameters()]


def opacus(problem: Problem, batch: int, way: str, kind: str) -> list[Tensor]:
    """The same by Opacus."""
    model, (x, y) = problem.net(), problem.data(batch)
    optimizers = importlib.import_module("opacus.optimizers")
    grad_sample = importlib.import_module("opacus.grad_sample")
    utils = importlib.import_module("opacus.utils.fast_gradient_clipping_utils")
    is_ghost, count = way == "ghost", len([*model.parameters()])
    wrap = "GradSampleModuleFastGradientClipping" if is_ghost else "GradSampleModule"
    bound = {"max_grad_norm": BOUND} if is_ghost else {}
    wrapped = getattr(grad_sample, wrap)(model, strict=False, **bound)
    name = {"ghost": "DPOptimizerFastGradientClipping"}.get(
        way, "DPOptimizer" if kind == "flat" else "DPPerLayerOptimizer"
    )
    optimizer = getattr(optimizers, name)(
        torch.optim.SGD(model.parameters(), lr=RATE),
        noise_multiplier=0.0,
        max_grad_norm=BOUND if kind == "flat" else [BOUND / sqrt(count)] * count,
        expected_batch_size=batch,
    )
    lossfunc: Any = nn.CrossEntropyLoss()
    if is_ghost:
        lossfunc = utils.DPLossFastGradientClipping(wrapped, optimizer, lossfunc)
    for _ in range(STEPS):
        optimizer.zero_grad()
        lossfunc(wrapped(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def difference(problem: Problem, batch: int, way: str, kind: str) -> float:
    """The largest of any entry of a parameter."""
    pairs = zip(ours(problem, batch, kind), opacus(problem, batch, way, kind), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def epsilons() -> str:
    """Of Rényi accountants for the same numbers: ours, and that of Opacus."""
    theirs = importlib.import_module("opacus.accountants").RDPAccountant()
    ours = Accountant("rdp")
    for _ in range(EPSILON_STEPS):
        theirs.step(noise_multiplier=1.1, sample_rate=0.01)
        ours.add(1.1, 0.01)
    return f"{ours.epsilon(1e-5):.4f} {theirs.get_epsilon(1e-5):.4f}"


def step_of(problem: Problem, batch: int, is_captured: bool = False) -> tuple[Step, nn.Module]:
    """A private pass, up to the clipped sums; or the same as a captured step."""
    private, x, y = private_of(problem, batch, "flat")
    draws = importlib.import_module("backpack_privacy.sampling")
    draw = draws.Draw(range(batch), batch, is_last=False)  # so that the optimizer takes no step
    replay = capture(lambda x, y: private.lossfunc(private.model(x), y), private)

    def step() -> None:
        private.begins()
        private.draws(draw)
        if is_captured:
            replay(x, y)
        else:
            private.step(private.lossfunc(private.model(x), y))

    return step, private.model


def times(problem: Problem, batch: int, seconds: float, clock: str) -> dict[str, float]:
    """Of each that is installed, relative to a plain pass."""
    quantity = QUANTITIES["ClippedSumGrad"]
    makers: dict[str, Callable[[], tuple[Step, nn.Module]]] = {
        name: lambda name=name: FIRST_ORDER[name](problem, quantity, batch)  # type: ignore[misc]
        for name in ("gradient", "vmap", "opacus", "ghost")
    }
    makers["private"] = lambda: step_of(problem, batch)
    makers["captured"] = lambda: step_of(problem, batch, is_captured=True)
    steps, models = dict[str, Step](), dict[str, nn.Module]()
    for name, make in makers.items():
        try:
            step, model = make()
            for _ in range(RECORDED if name == "captured" else SETTLED):
                step()
                forget(model, quantity)  # as below: a step is recorded for the results it finds
        except Exception:  # whatever it is, the peer cannot do this
            if name in ("gradient", "private", "captured"):
                raise
        else:
            steps[name], models[name] = step, model
    found = alternate(steps, seconds, clock, lambda name: forget(models[name], quantity), least=5)
    return {name: found.ratio(name, "gradient") for name in steps if name != "gradient"}


def grown(problem: Problem, batch: int, way: str) -> int:
    """Bytes by which this process grows at most in a plain or a private pass, after some."""
    quantity = QUANTITIES["ClippedSumGrad"]
    makers: dict[str, Callable[[], tuple[Step, nn.Module]]] = {
        "plain": lambda: FIRST_ORDER["gradient"](problem, quantity, batch),
        "private": lambda: step_of(problem, batch),
    }
    step, model = makers[way]()
    for _ in range(SETTLED):
        step()
        model.zero_grad()
        forget(model, quantity)
    return growth(step)


def memory(name: str, batch: int) -> str:
    """What a pass takes at its peak, private and plain, each in a process of its own."""
    found = []
    for way in ("plain", "private"):
        command = [sys.executable, "-m", "benchmarks.private", "--grow", name, way, str(batch)]
        command += ["--threads", str(torch.get_num_threads())]
        told = subprocess.run(command, env=freeing(), capture_output=True, text=True, check=True)
        found.append(int(told.stdout.split()[-1]) / 2**20)
    return f"memory {found[1] / found[0]:.2f} ({found[0]:.1f} and {found[1]:.1f} MiB)"


def of_users(count: int, seconds: float, clock: str) -> dict[str, float]:
    """Clipped sums of 8 images for each of some users, relative to a plain pass over the images.

    Args:
        count: How many users.
        seconds: How long to measure.
        clock: See :func:`benchmarks.measure.alternate`.
    """
    extension = importlib.import_module("backpack_core.extensions").ClippedSumGrad(BOUND)
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()]
    model = extend(nn.Sequential(*layers, nn.Linear(16 * 24 * 24, 10)))
    lossfunc, rows = extend(nn.CrossEntropyLoss()), 8 * count
    x, y = torch.randn(rows, 1, 28, 28), torch.randint(10, (rows,))
    drawn = torch.randint(count, (rows,)).unique(return_inverse=True)[1]
    owners = {"none": None, "8 records each": torch.arange(rows) // 8}
    owners |= {"other numbers": drawn.sort()[0], "in no order": drawn}

    def clipped(owner: Tensor | None) -> Step:
        def step() -> None:
            with backpack(extension, gradient="none", samples=owner):
                lossfunc(model(x), y).backward()

        return step

    def plain() -> None:
        model.zero_grad()
        lossfunc(model(x), y).backward()

    steps: dict[str, Step] = {name: clipped(owner) for name, owner in owners.items()}
    steps["plain"] = plain
    for step in steps.values():
        for _ in range(SETTLED):
            step()
    found = alternate(steps, seconds, clock, lambda _: None, least=5)
    return {name: found.ratio(name, "plain") for name in owners}


def of_noise(count: int, seconds: float, clock: str) -> dict[str, float]:
    """Nanoseconds for each of some Gaussian numbers, by what they come from.

    Args:
        count: How many numbers.
        seconds: How long to measure.
        clock: See :func:`benchmarks.measure.alternate`.
    """
    like = torch.empty(count)
    sources = {"a seed": source(0), "the cryptographic source": source(None)}
    steps: dict[str, Step] = {name: partial(each.normal, like) for name, each in sources.items()}
    steps["its bytes alone"] = partial(ssl.RAND_bytes, 8 * SUMMED * count)
    steps["the system's bytes alone"] = partial(os.urandom, 8 * SUMMED * count)
    found = alternate(steps, seconds, clock, lambda _: None, least=5)
    return {name: 1e9 * found.best(name) / count for name in steps}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.private", description=__doc__)
    add = parser.add_argument
    add("--problem", nargs="*", choices=PROBLEMS, default=["gpt2", "llama", "vit", "resnet18"])
    add("--same", nargs="*", choices=PROBLEMS, default=["mlp", "2c2d", "gpt2", "llama", "vit"])
    add("--batch", type=int, help="number of samples (default: the problem's)")
    add("--users", type=int, help="measure clipped sums of so many users, and nothing else")
    add("--noise", type=int, help="measure so many Gaussian numbers, and nothing else")
    add("--seconds", type=float, default=10.0)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--clock", choices=CLOCKS, default="wall")
    add("--memory", action="store_true", help="measure the peak of a pass, and no time")
    add("--grow", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # peers warn of what does not matter here
    if options.users:
        ratios = of_users(options.users, options.seconds, options.clock)
        print(*(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()), sep="\n")
        return
    if options.noise:
        costs = of_noise(options.noise, options.seconds, options.clock)
        print(*(f"{name}: {cost:.1f} ns a number" for name, cost in costs.items()), sep="\n")
        return
    if options.grow:
        name, way, batch = options.grow
        print(grown(PROBLEMS[name], int(batch), way))
        return
    if options.memory:
        for name in options.problem:
            print(f"{name:12}", memory(name, options.batch or PROBLEMS[name].batch), flush=True)
        return
    for name in options.same:
        for way, kind in WAYS:
            try:
                found = f"{difference(PROBLEMS[name], options.batch or 8, way, kind):.1e}"
            except RuntimeError as error:  # of Opacus, in its rule for embeddings
                found = f"fails: {error}"[:60]
            print(f"{name:12} Opacus, {way}, {kind:20} {found}", flush=True)
    if options.same:
        print("epsilon, here and Opacus", epsilons(), flush=True)
    for name in options.problem:
        problem = PROBLEMS[name]
        ratios = times(problem, options.batch or problem.batch, options.seconds, options.clock)
        print(f"{name:12}", *(f"{peer} {ratio:.2f}" for peer, ratio in ratios.items()), flush=True)


if __name__ == "__main__":
    main()
