"""Where the grouped kernel beats unfolded patches: ``python -m benchmarks.kernels``.

The products of a convolution's output columns and patches are formed both ways, in pieces as the
contractions do, alternately in one process. ``docs/design/products.md`` has figures from
here, and ``DirectPatches.suits`` is the rule that fits them. With ``--whole``, all products end up
in one tensor, as individual gradients and Jacobians do: those of the kernel are copied there.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_layers.conv import DirectPatches, Patches
from backpack_products import AffineProduct, FirstOrderExtension, contractions
from backpack_products.rows import Rows
from benchmarks.measure import alternate

# The convolution, pixels along an axis of its input, columns.
CASES: list[tuple[nn.Module, int, int]] = [
    (nn.Conv2d(64, 64, 3, padding=1, groups=64), 16, 1),
    (nn.Conv3d(16, 16, 3, padding=1), 8, 1),
    *((nn.Conv2d(16, 16, 3, padding=1), size, 1) for size in (8, 16, 32)),
    (nn.Conv2d(32, 32, 7, padding=3, stride=2), 32, 1),
    *((nn.Conv2d(48, 48, 3, padding=1), size, 1) for size in (8, 16, 32)),
    (nn.Conv2d(64, 64, 3, padding=2, dilation=2), 16, 1),
    (nn.Conv2d(64, 64, 3, padding=1, groups=2), 16, 1),
    (nn.Conv2d(40, 40, 3, padding=1), 16, 1),
    *((nn.Conv2d(3, 64, 5), 32, columns) for columns in (1, 10)),
    *((nn.Conv2d(1, 32, 5, padding=2), 28, columns) for columns in (1, 10)),
    *((nn.Conv2d(64, 64, 3, padding=1), size, 1) for size in (8, 12, 16)),
    *((nn.Conv2d(16, 32, 3, padding=1), 8, columns) for columns in (1, 3, 10)),
    *((nn.Conv2d(8, 8, 3, padding=1), 32, columns) for columns in (3, 10)),
    *((nn.Conv2d(128, 128, 3, padding=1), size, 1) for size in (16, 24)),
    (nn.Conv2d(96, 128, 3, padding=1), 7, 1),
    (nn.Conv2d(64, 64, 1), 16, 1),
    (nn.Conv2d(20, 20, 3, padding=1), 16, 1),
]


class Comparison(FirstOrderExtension):
    """Measures at a convolution instead of computing anything."""

    savefield = "kernel_times"

    def __init__(self, columns: int, seconds: float, keeps: bool) -> None:
        """Store how many columns there are, how long to repeat, and whether products are kept."""
        super().__init__()
        self.columns, self.seconds, self.keeps = columns, seconds, keeps

    def read(self, product: AffineProduct) -> tuple[bool, float, float]:
        """Whether the rule takes the kernel, milliseconds of patches, time of the kernel to it."""
        direct = product.inp
        assert isinstance(direct, DirectPatches)
        out = torch.randn(self.columns, *product.out.shape[1:])
        inputs = {"kernel": _as(_Always, direct), "patches": _as(Patches, direct)}

        whole = out.new_empty(*out.shape[:2], *out.shape[3:], direct.shape[3])

        def form(inp: Rows) -> None:
            if self.keeps and not isinstance(inp, DirectPatches):
                for _ in contractions.form(out, inp, whole):
                    pass
                return
            for some, rows, piece in contractions.pieces(out, inp):
                if self.keeps:
                    whole[some, rows] = piece.permute(2, 0, 1, 3, 4)

        steps = {key: lambda inp=inp: form(inp) for key, inp in inputs.items()}
        times = alternate(steps, self.seconds, "wall", lambda _: None, least=5)
        joins = not self.keeps or contractions._joins_columns(out, direct)
        suits = joins and direct.suits(self.columns, out)
        return suits, 1e3 * times.best("patches"), times.best("kernel") / times.best("patches")


class _Always(DirectPatches):
    """The kernel, whether it is faster or not."""

    def suits(self, columns: int, out: Tensor) -> bool:
        """Always."""
        return True


def _as(kind: type[Patches], given: Patches) -> Patches:
    """The same unfolded input in another way."""
    return kind(given._conv, given._unfold, given._input, given._size)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--whole", action="store_true", help="keep all products")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for module, size, columns in CASES:
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.dim() > 1)
        conv = extend(module)
        dims = conv.weight.dim() - 2
        x = torch.randn(options.samples, conv.in_channels, *[size] * dims)
        with backpack(Comparison(columns, options.seconds, options.whole)):
            conv(x).sum().backward()
        suits, patches, ratio = conv.weight.kernel_times
        print(
            f"{conv!s:95} {size:3} pixels {columns:3} columns  patches {patches:7.2f} ms   "
            f"kernel / patches {ratio:5.2f}   {'kernel' if suits else 'patches'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
