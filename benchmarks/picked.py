"""A head on rows that a mask picked, beside one on all: ``python -m benchmarks.picked``.

As the head of a masked language model: a layer for every token, and a head for a share of them. The
same net with a head for every token is what it should cost no more than. Forward and backward pass
with an extension; times alternate in one process, and the least counts.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

import backpack_core.extensions
from backpack_core import backpack, extend
from benchmarks.measure import CLOCKS, alternate, forget_all

TOKENS, WIDTH, CLASSES = 64, 128, 512


class Tagger(nn.Module):
    """Classes of the tokens that a mask picks, or of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[R, C]`` for the rows that were picked, ``[N * T, C]`` for all."""
        hidden = torch.tanh(self.layer(x))
        rows: Tensor = self.head(hidden.flatten(0, 1) if mask is None else hidden[mask])
        return rows


def _step(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor | None, extension: str) -> None:
    loss = extend(nn.CrossEntropyLoss())(model(x, mask), y)
    with backpack(getattr(backpack_core.extensions, extension)()):
        loss.backward()


def main() -> None:
    """Measure and print both times, and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picked", description=__doc__)
    default = ["BatchGrad", "BatchL2Grad", "DiagGGNMC", "KFAC"]
    parser.add_argument("extensions", nargs="*", default=default)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.15, help="of the tokens that are picked")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each extension")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(options.batch, TOKENS, WIDTH)
    mask = torch.rand(options.batch, TOKENS) < options.share
    y = torch.randint(0, CLASSES, mask.shape)
    print(f"{int(mask.sum())} of {mask.numel()} tokens are picked")
    print("{:14} {:>10} {:>12} {:>6}".format("extension", "all (ms)", "picked (ms)", "ratio"))
    for name in options.extensions:
        model = extend(Tagger())
        steps = {
            "all": partial(_step, model, x, y.flatten(), None, name),
            "picked": partial(_step, model, x, y[mask], mask, name),
        }
        for step in steps.values():
            step()
            step()
        drop = partial(forget_all, dict.fromkeys(steps, model))
        times = alternate(steps, options.seconds, options.clock, drop)
        whole, some = (1e3 * times.best(key) for key in ("all", "picked"))
        print(f"{name:14} {whole:10.2f} {some:12.2f} {times.ratio('picked', 'all'):6.2f}")


if __name__ == "__main__":
    main()
