"""Parameters that functions use, beside modules: ``python -m benchmarks.functions``.

The same net twice, forward and backward pass with an extension: of modules, and of functions of
parameters that a module of the user's owns. Times alternate in one process, and the least counts.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import backpack_core.extensions
from backpack_core import backpack, extend
from benchmarks.measure import CLOCKS, alternate, forget_all

WIDTHS = (784, 512, 256, 10)


class Functions(nn.Module):
    """A perceptron by ``F.linear``, with the parameters of another one."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        own = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self.weights = nn.ParameterList([layer.weight.detach().clone() for layer in own])
        self.biases = nn.ParameterList([layer.bias.detach().clone() for layer in own])

    def forward(self, x: Tensor) -> Tensor:
        """Of images the classes."""
        *first, last = zip(self.weights, self.biases, strict=True)
        for weight, bias in first:
            x = torch.sigmoid(F.linear(x, weight, bias))
        return F.linear(x, *last)


def _layers() -> nn.Sequential:
    pairs = [(nn.Linear(before, after), nn.Sigmoid()) for before, after in pairwise(WIDTHS)]
    return nn.Sequential(*[part for pair in pairs for part in pair][:-1])


def _step(model: nn.Module, x: Tensor, y: Tensor, extension: str) -> None:
    loss = extend(nn.CrossEntropyLoss())(model(x), y)
    with backpack(getattr(backpack_core.extensions, extension)()):
        loss.backward()


def main() -> None:
    """Measure and print both times, and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.functions", description=__doc__)
    parser.add_argument("extensions", nargs="*", default=["BatchGrad", "BatchL2Grad", "DiagGGNMC"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each extension")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.manual_seed(0)
    x, y = torch.rand(options.batch, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (options.batch,))
    print(
        "{:14} {:>12} {:>15} {:>6}".format("extension", "modules (ms)", "functions (ms)", "ratio")
    )
    for name in options.extensions:
        layers = _layers()
        models = {"modules": extend(layers), "functions": extend(Functions(layers))}
        steps = {key: partial(_step, model, x, y, name) for key, model in models.items()}
        for step in steps.values():
            step()
            step()
        drop = partial(forget_all, models)
        times = alternate(steps, options.seconds, options.clock, drop)
        own, other = (1e3 * times.best(key) for key in ("modules", "functions"))
        ratio = times.ratio("functions", "modules")
        print(f"{name:14} {own:12.2f} {other:15.2f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
