"""What extending a model costs: ``python -m benchmarks.overhead``.

Microseconds for each call of a module, in a chain of ``Linear`` layers of width 4: forward, forward
and backward, and with individual gradients; before them, with hooks that do nothing, which is what
any recording costs. Then ratios, of runs that alternate in one process:

- forward and backward pass of an extended model with no extension active, over those of a plain one
  (the cost of recording; target: at most 1.1), for a perceptron of several widths, with the width
  at which the cost is a tenth, and for a small Llama;
- those with individual gradients of one convolution, over those of the plain convolution (target:
  at most 1.5);
- a forward pass of frozen trunks, which leave a number for each row, over a plain one (target: at
  most 1.1).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from math import log
from statistics import median

import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from benchmarks.measure import CLOCKS
from benchmarks.peers import extended, gradient
from benchmarks.problems import PROBLEMS
from benchmarks.quantities import QUANTITIES


def ratio(
    candidate: Callable[[], None], reference: Callable[[], None], rounds: int, clock: str
) -> tuple[float, float, float]:
    """Alternate two functions.

    Returns:
        Median seconds of the candidate, of the reference, and the median of the rounds' ratios.
    """
    now = CLOCKS[clock]

    def seconds(function: Callable[[], None]) -> float:
        start = now()
        function()
        return now() - start

    for function in (candidate, reference) * 3:
        function()
    pairs = [(seconds(candidate), seconds(reference)) for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    return median(ours), median(theirs), median(a / b for a, b in pairs)


def step(model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> None:
    """A forward and a backward pass."""
    model.zero_grad()
    lossfunc(model(x), y).backward()


def calls(rounds: int, clock: str, count: int = 24) -> None:
    """Microseconds for each call, above those of a plain module."""
    plain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])
    extended, x = extend(copy.deepcopy(plain)), torch.randn(2, 4, requires_grad=True)
    hooked = copy.deepcopy(plain)
    for layer in hooked:
        layer.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
        layer.register_forward_hook(lambda *_: None, with_kwargs=True)

    def individual() -> None:
        output = extended(x).sum()
        with backpack(BatchGrad(), check="never"):
            output.backward()

    for what, ours, theirs in (
        ("forward, with two hooks that do nothing", lambda: hooked(x), lambda: plain(x)),
        ("forward", lambda: extended(x), lambda: plain(x)),
        ("forward and backward", lambda: extended(x).sum().backward(), None),
        ("with individual gradients", individual, None),
    ):
        reference = theirs or (lambda: plain(x).sum().backward())
        mine, other, _ = ratio(ours, reference, rounds, clock)
        each = (mine - other) / count * 1e6
        print(f"{what:42} {each:9.1f} us more for each call   plain {other / count * 1e6:9.1f} us")


def recording(rounds: int, clock: str, batch: int = 128, width: int = 256) -> float:
    """The cost of recording, in a perceptron of three layers: the ratio to a plain pass."""
    sizes = [width, width, width, 10]
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ReLU()]
    plain = nn.Sequential(*layers[:-1])
    extended, lossfunc = extend(copy.deepcopy(plain)), nn.CrossEntropyLoss()
    extended_lossfunc = extend(nn.CrossEntropyLoss())
    x, y = torch.randn(batch, width), torch.randint(0, 10, (batch,))
    ours, theirs, factor = ratio(
        lambda: step(extended, extended_lossfunc, x, y),
        lambda: step(plain, lossfunc, x, y),
        rounds,
        clock,
    )
    report(f"extended, no extension active, width {width}", ours, theirs, factor, target=1.1)
    return factor


class Residual(nn.Module):
    """A layer that is added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """``x + layers(x)``."""
        result: Tensor = x + self.layers(x)
        return result


def _run(model: nn.Module, inp: Tensor) -> None:
    model(inp)


def frozen(rounds: int, clock: str) -> None:
    """The cost of what frozen layers leave for each row, in forward passes behind which one trains.

    There is a trunk of twelve residual blocks for ``[16, 64, 256]``, and one of four convolutions.
    """
    blocks = [Residual(256) for _ in range(12)]
    maps = [(3, 32), (32, 64), (64, 64), (64, 128)]
    images = [nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU()) for i, o in maps]
    for name, trunk, inp, size in (
        ("residual", nn.Sequential(*blocks), torch.randn(16, 64, 256), 256),
        (
            "convolutional",
            nn.Sequential(*images, nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            torch.randn(8, 3, 56, 56),
            128,
        ),
    ):
        plain = nn.Sequential(trunk.requires_grad_(False), nn.Linear(size, 10))
        model = extend(copy.deepcopy(plain))
        found = ratio(partial(_run, model, inp), partial(_run, plain, inp), rounds, clock)
        report(f"forward of a frozen trunk, {name}", *found, target=1.1)


def width_of_a_tenth(ratios: Mapping[int, float]) -> float | None:
    """The width at which recording costs a tenth, between the two that it lies between.

    Args:
        ratios: By width, in rising order.

    Returns:
        On a line between the logarithms; ``None`` where all cost more, or less.
    """
    for (low, more), (high, less) in pairwise(ratios.items()):
        if more > 1.1 >= less:
            share = log((more - 1) / 0.1) / log((more - 1) / max(less - 1, 1e-3))
            return low * (high / low) ** share
    return None


def recording_of_a_problem(name: str, rounds: int, clock: str) -> None:
    """The same for one of the problems of the comparison."""
    problem = PROBLEMS[name]
    steps = [
        make(problem, QUANTITIES["BatchGrad"], problem.batch)[0] for make in (extended, gradient)
    ]
    ours, theirs, factor = ratio(*steps, rounds, clock)
    report(f"extended, no extension active, {name}", ours, theirs, factor, target=1.1)


def individual_gradients(rounds: int, clock: str, batch: int = 64) -> None:
    """Individual gradients of a convolution with 64 channels on maps of 16 x 16.

    Its input requires a gradient, as in the middle of a net.
    """
    plain = nn.Conv2d(64, 64, 3, padding=1)
    extended = extend(copy.deepcopy(plain))
    x = torch.randn(batch, 64, 16, 16, requires_grad=True)
    weights = torch.randn(batch, 64, 16, 16)

    def ours() -> None:
        extended.zero_grad()
        output = extended(x)
        with backpack(BatchGrad()):
            output.backward(weights)

    def theirs() -> None:
        plain.zero_grad()
        plain(x).backward(weights)

    mine, reference, factor = ratio(ours, theirs, rounds, clock)
    report("individual gradients of a convolution", mine, reference, factor, target=1.5)


def report(what: str, ours: float, theirs: float, factor: float, target: float) -> None:
    """Print a line."""
    print(
        f"{what:42} {ours * 1e3:9.3f} ms   plain {theirs * 1e3:9.3f} ms   "
        f"ratio {factor:5.2f} (target {target})"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    calls(100, options.clock)
    ratios = {
        width: recording(4 * 10**4 // width, options.clock, width=width)
        for width in (64, 256, 512, 1024)
    }
    found = width_of_a_tenth(ratios)
    if found is not None:
        print(f"recording costs a tenth of a pass at width {found:.0f}")
    recording_of_a_problem("llama-256", 15, options.clock)
    individual_gradients(30, options.clock)
    frozen(60, options.clock)


if __name__ == "__main__":
    main()
