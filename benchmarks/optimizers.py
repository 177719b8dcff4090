"""Second-order optimizers beside AdamW: the loss over time, each with its best learning rate.

Run ``python -m benchmarks.optimizers [--picture loss.png]``. Every run has the same seconds of CPU
time on one thread, of which evaluations take none. Each kind has as many rates to choose from. What
is printed is the loss at the end (the median over seeds), and how many times sooner than AdamW a
kind reached AdamW's last loss.
"""

from __future__ import annotations

import argparse
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backpack_core import extend
from backpack_optimizers import EKFAC, KFAC, GaussNewton

BATCH = 256
Make = Callable[[nn.Module, nn.Module, float], Any]


class Kind(NamedTuple):
    """An optimizer with its learning rates."""

    make: Make
    rates: tuple[float, float, float]


class Run(NamedTuple):
    """Losses over all data after steps, and the seconds of training until then."""

    seconds: list[float]
    losses: list[float]

    def until(self, loss: float) -> float:
        """When a loss was first reached; infinity if it was not."""
        best = [-min(self.losses[: k + 1]) for k in range(len(self.losses))]
        place = bisect_left(best, -loss)
        return self.seconds[place] if place < len(best) else float("inf")


def kinds() -> dict[str, Kind]:
    """AdamW first. ``kl_clip`` bounds early steps, when factors are poor."""
    settings: dict[str, Any] = {"damping": 1e-2, "kl_clip": 1e-3, "inverses_every": 5}
    return {
        "AdamW": Kind(
            lambda m, loss, lr: torch.optim.AdamW(m.parameters(), lr), (3e-3, 1e-2, 3e-2)
        ),
        "KFAC": Kind(lambda m, loss, lr: KFAC(extend(m), lr=lr, **settings), (0.03, 0.1, 0.3)),
        "EKFAC": Kind(lambda m, loss, lr: EKFAC(extend(m), lr=lr, **settings), (0.03, 0.1, 0.3)),
        "GaussNewton": Kind(
            lambda m, loss, lr: GaussNewton(m, loss, lr=lr, damping=1e-2, max_iterations=10),
            (0.25, 0.5, 1.0),
        ),
    }


def digits() -> tuple[Tensor, Tensor]:
    """Images ``[N, 64]`` and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def fully_connected() -> nn.Module:
    """Three layers."""
    layers = (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    """Two convolutions and a layer."""
    body = (nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 16, 3), nn.Tanh(), nn.Flatten())
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *body, nn.Linear(256, 10))


PROBLEMS: dict[str, Callable[[], nn.Module]] = {
    "fully connected": fully_connected,
    "convolutions": convolutions,
}


def train(build: Callable[[], nn.Module], make: Make, lr: float, seed: int, limit: float) -> Run:
    """Train for some seconds."""
    torch.manual_seed(seed)
    (x, y), model, lossfunc = digits(), build(), extend(nn.CrossEntropyLoss())
    optimizer, run, spent = make(model, lossfunc, lr), Run([], []), 0.0
    while spent < limit:
        rows = torch.randint(len(x), (BATCH,))
        start = time.process_time()
        _step(optimizer, model, lossfunc, x[rows], y[rows])
        spent += time.process_time() - start
        with torch.no_grad():
            run.losses.append(nn.functional.cross_entropy(model(x), y).item())
        run.seconds.append(spent)
    return run


def _step(optimizer: Any, model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = lossfunc(model(x), y)
        loss.backward()
        return loss

    is_second = isinstance(optimizer, GaussNewton)
    optimizer.step([(x, y)] if is_second else closure)


def best(build: Callable[[], nn.Module], kind: Kind, seeds: int, limit: float) -> list[Run]:
    """Runs of the rate with the least loss at the end, one for each seed."""
    runs = [[train(build, kind.make, lr, s, limit) for s in range(seeds)] for lr in kind.rates]
    return min(runs, key=last)


def last(runs: list[Run]) -> float:
    """The median loss at the end."""
    return statistics.median(run.losses[-1] for run in runs)


def sooner(plain: list[Run], runs: list[Run]) -> str:
    """How many times sooner the last loss of plain runs was reached, in words."""
    goals = [run.losses[-1] for run in plain]
    times = [p.until(goal) / r.until(goal) for p, r, goal in zip(plain, runs, goals, strict=True)]
    found = statistics.median(times)
    return f"{found:.2f} times sooner" if found else "not reached"


def draw(found: dict[str, dict[str, list[Run]]], path: Path) -> None:
    """The loss over time, a panel for each problem."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(9, 3.6), layout="constrained")
    for axis, (name, by_kind) in zip(axes, found.items(), strict=True):
        for kind, runs in by_kind.items():
            axis.plot(runs[0].seconds, runs[0].losses, label=kind)
        axis.set(title=name, xlabel="seconds of training", ylabel="loss", yscale="log")
    axes[0].legend()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Print a line for each problem and kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="where to draw the loss over time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[Run]]] = {}
    for name, build in PROBLEMS.items():
        of = partial(best, build, seeds=options.seeds, limit=options.seconds)
        found[name] = {kind: of(settings) for kind, settings in kinds().items()}
        plain = found[name]["AdamW"]
        for kind, runs in found[name].items():
            print(
                f"{name:16} {kind:12} {len(runs[0].losses):5} steps   loss {last(runs):8.1e}   "
                f"AdamW's last loss {sooner(plain, runs)}",
                flush=True,
            )
    if options.picture:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
