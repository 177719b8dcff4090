"""``accumulate`` beside plain gradient passes over the same batches.

``python -m benchmarks.over_data [SAMPLES]``: time, and peak memory against that of one batch.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core.extensions import KFAC, DiagGGNMC, Variance
from backpack_data import accumulate

BATCH = 100


class Images:
    """As many batches as are asked for, none of them kept."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for first in range(0, self.samples, BATCH):
            size = min(BATCH, self.samples - first)
            x = torch.rand(size, 3, 32, 32, generator=generator)
            yield x, torch.randint(0, 10, (size,), generator=generator)


def net() -> nn.Module:
    """3C3D, as BackPACK's experiments have it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(64, 96, 3),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(96, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Flatten(),
        nn.Linear(1152, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def seconds(run: Callable[[], Any]) -> float:
    """How long something takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def plain(model: nn.Module, images: Images) -> None:
    """A gradient of each batch."""
    lossfunc = nn.CrossEntropyLoss()
    for x, y in images:
        torch.autograd.grad(lossfunc(model(x), y), list(model.parameters()))


def peak() -> float:
    """The most memory that the process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(samples: int) -> None:
    """Print a table."""
    model, images, one = net(), Images(samples), Images(BATCH)
    plain(model, one)
    base = seconds(lambda: plain(model, images))
    print(f"{samples} images in batches of {BATCH}, {torch.get_num_threads()} threads")
    print(f"{'plain gradients':16} {base:8.1f} s          peak {peak():7.0f} MiB")
    for kind in (Variance, DiagGGNMC, KFAC):
        run = lambda data: accumulate(  # noqa: E731
            model,
            nn.CrossEntropyLoss(),
            data,
            kind(),  # noqa: B023
            progress=False,
        )
        run(one)
        before = peak()
        taken = seconds(lambda: run(images))  # noqa: B023
        print(
            f"{kind.__name__:16} {taken:8.1f} s  {taken / base:5.2f}×  peak {peak():7.0f} MiB, "
            f"{peak() - before:+.0f} against one batch"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
