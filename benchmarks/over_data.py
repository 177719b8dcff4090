"""``accumulate`` beside plain gradient passes over the same batches, and beside other libraries.

``python -m benchmarks.over_data --images 50000``: time, and peak memory against that of one batch.
Where curvlinops, laplace-torch and kronfluence are installed (``make bench-env``) and do the same,
they run on the same batches in turn with ours, and the numbers of both are compared first.
"""

from __future__ import annotations

import argparse
import copy
import resource
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core.extensions import KFAC, KFLR, DiagGGNExact, DiagGGNMC, Variance
from backpack_data import accumulate
from benchmarks.data_peers import PEERS, Peer
from benchmarks.measure import CLOCKS


class Images:
    """As many batches as are asked for, none of them kept."""

    def __init__(self, samples: int, batch: int) -> None:
        self.samples, self.batch = samples, batch
        self.dataset = range(samples)  # some ask it for its length

    def __len__(self) -> int:
        return -(-self.samples // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for first in range(0, self.samples, self.batch):
            size = min(self.batch, self.samples - first)
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


OURS: dict[str, Callable[[], Any]] = {
    "Variance": Variance,
    "DiagGGNMC": DiagGGNMC,
    "DiagGGNExact": DiagGGNExact,
    "KFAC": KFAC,
    "KFAC, expand": lambda: KFAC(1, "expand"),
    "KFAC, reduce": lambda: KFAC(1, "reduce"),
    "KFLR, expand": lambda: KFLR("expand"),
    "KFLR, reduce": lambda: KFLR("reduce"),
}


def plain(model: nn.Module, images: Images) -> None:
    """A gradient of each batch."""
    lossfunc = nn.CrossEntropyLoss()
    for x, y in images:
        torch.autograd.grad(lossfunc(model(x), y), list(model.parameters()))


def run(model: nn.Module, images: Images, name: str, check: Any = "first") -> Any:
    """Ours, of the sum over all samples."""
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    return accumulate(model, lossfunc, images, OURS[name](), progress=False, check=check)


def peak() -> float:
    """The most memory that the process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def difference(peer: Peer, model: nn.Module, images: Images) -> str:
    """The largest relative distance of what both give, or why there is none."""
    mine, other = peer.mine(run(model, images, peer.ours)), peer.theirs(model, images)
    if other is None:
        return "drawn"
    assert mine.keys() <= other.keys()
    found = [float((mine[k] - other[k]).norm() / other[k].norm()) for k in mine]
    return f"{max(found):.0e}"


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.over_data", description=__doc__)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1, help="the best of these counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--peers", action="store_true", help="the table of others alone")
    parser.add_argument("--check", default="first", help="'never', where batches are few")
    return parser.parse_args()


def best(asked: argparse.Namespace, *runs: Callable[[], Any]) -> list[float]:
    """The shortest time of each, run in turn."""
    clock = CLOCKS[asked.clock]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(asked.rounds):
        for own, function in zip(times, runs, strict=True):
            start = clock()
            function()
            own.append(clock() - start)
    return [min(own) for own in times]


def row_of_plain(asked: argparse.Namespace, name: str) -> str:
    """One of ours beside plain gradients."""
    model, images, one = net(), *images_of(asked)
    run(model, one, name)
    before = peak()
    ours = partial(run, model, images, name, asked.check)
    base, taken = best(asked, partial(plain, model, images), ours)
    return (
        f"{name:16} {taken:8.1f} s  {taken / base:5.2f} × plain ({base:.1f} s)  "
        f"{peak() - before:+.0f} MiB against one batch"
    )


def row_of_peer(asked: argparse.Namespace, peer: Peer) -> str:
    """One of ours beside another library."""
    if not peer.is_installed:
        return f"{peer.ours:16} {peer.library} is not installed"
    model, images, one = net(), *images_of(asked)
    distance = difference(peer, net(), Images(2 * asked.batch, asked.batch))
    theirs = copy.deepcopy(model)
    peer.theirs(theirs, one), run(model, one, peer.ours)
    ours = partial(run, model, images, peer.ours, asked.check)
    mine, other = best(asked, ours, partial(peer.theirs, theirs, images))
    return (
        f"{peer.ours:16} {mine:8.1f} s  {peer.library:28} {other:8.1f} s  "
        f"{mine / other:5.2f} ×  difference {distance}"
    )


def images_of(asked: argparse.Namespace) -> tuple[Images, Images]:
    """All batches, and one."""
    return Images(asked.images, asked.batch), Images(asked.batch, asked.batch)


def main() -> None:
    """Print two tables."""
    asked = options()
    torch.set_num_threads(asked.threads)
    plain(net(), images_of(asked)[1])
    print(f"{asked.images} images in batches of {asked.batch}, {asked.threads} threads")
    for name in () if asked.peers else OURS:
        if asked.only in name:
            print(row_of_plain(asked, name), flush=True)
    for peer in PEERS:
        if asked.only in f"{peer.ours} {peer.library}":
            print(row_of_peer(asked, peer), flush=True)


if __name__ == "__main__":
    main()
