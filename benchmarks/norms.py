"""What norms and sums of individual gradients cost by each way: ``python -m benchmarks.norms``.

Milliseconds of random factors ``[N, S, O]`` and ``[N, S, I]``, the least of alternating rounds. The
figures in ``docs/design/products.md`` are from here, and ``contractions.is_gram_cheaper`` and
``clipping.is_cheaper_kept`` count by them. ``kept`` forms individual gradients, reads norms and
sum, and weights what it kept; beside it stands the way without, ``pieces+sum`` and ``weighted``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from backpack_firstorder import contractions
from backpack_products.contractions import sums
from benchmarks.measure import CLOCKS, alternate

SHAPES = (
    (64, 128, 128), (64, 384, 128), (64, 128, 512), (64, 256, 256), (64, 256, 1024),
    (32, 256, 256), (128, 256, 256), (256, 128, 128),
)  # fmt: skip


def ways(out: Tensor, inp: Tensor) -> dict[str, Callable[[], object]]:
    """By name: the plain gradient, norms, norms and sum, weighted sums."""
    samples, features, size = out.shape[1], out.shape[4], inp.shape[3]
    memory = out.new_empty(samples, features, size)  # that was written before
    weights, ones = torch.rand(samples), torch.ones(samples)

    def kept() -> Tensor:
        left, right = out.reshape(samples, -1, features), inp.reshape(samples, -1, size)
        rows = torch.bmm(left.mT, right, out=memory).view(samples, -1)
        return torch.linalg.vector_norm(rows, dim=1).sum() + rows.T @ ones + rows.T @ weights

    return {
        "plain": lambda: sums(out, inp),
        "Gram": lambda: contractions.norm_by_gram(out, inp),
        "pieces": lambda: contractions.moments(out, inp, False, False, True),
        "pieces+sum": lambda: contractions.moments(out, inp, True, False, True),
        "squares+sum": lambda: contractions.moments(out, inp, True, True, False),
        "weighted": lambda: sums(out * weights[:, None, None, None], inp),
        "kept": kept,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.norms", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for number, (positions, features, size) in enumerate(SHAPES):
        out = torch.randn(1, options.samples, positions, 1, features)
        inp = torch.randn(options.samples, positions, 1, size)
        steps = {name: _silent(way) for name, way in ways(out, inp).items()}
        if not number:
            print(
                f"{'S, O, I':>16}" + "".join(f"{name:>12}" for name in steps) + "  norm, with sum"
            )
        with torch.no_grad():
            times = alternate(steps, options.seconds, options.clock, lambda _: None, least=5)
            chosen = [contractions.is_gram_cheaper(out, inp, along) for along in (False, True)]
        row = "".join(f"{1e3 * times.best(name):>12.2f}" for name in steps)
        names = ", ".join("Gram" if gram else "pieces" for gram in chosen)
        print(f"{f'{positions}, {features}, {size}':>16}{row}  {names}", flush=True)


def _silent(way: Callable[[], object]) -> Callable[[], None]:
    def step() -> None:
        way()

    return step


if __name__ == "__main__":
    main()
