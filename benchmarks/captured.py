"""What a captured step costs: ``python -m benchmarks.captured``.

Plain passes that a step takes: by the engine, as a recorded graph, and ``vmap(grad)``, which gives
individual gradients alone. All ways alternate in one process, the 10 % quantile counts. The guard
is a part of the step, and is shown by itself.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from backpack_capture import capture
from backpack_core import backpack, extend
from backpack_core import extensions as known
from backpack_core.contract.extension import Extension
from benchmarks.problems import mlp


def chain(count: int, width: int, act: Callable[[], nn.Module]) -> nn.Module:
    """Linear layers of one width, the last of 10."""
    widths = [*[width] * count, 10]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """Two blocks with a way around them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 32]`` to ``[N, 10]``."""
        h = x + torch.relu(self.a(x))
        result: Tensor = self.c(h + torch.tanh(self.b(h)) * 0.5)
        return result


def cnn() -> nn.Module:
    """Two small convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 11 * 11, 10),
    )  # fmt: skip


PROBLEMS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3x64": (lambda: chain(3, 64, nn.Sigmoid), (32, 64)),
    "16x32": (lambda: chain(16, 32, nn.Tanh), (8, 32)),
    "residual": (Residual, (32, 32)),
    "cnn": (cnn, (16, 1, 28, 28)),
    "mlp": (mlp, (128, 784)),
}


def ways(
    problem: str, extension: Extension, is_individual: bool
) -> tuple[dict[str, Callable[[], object]], Callable[[], None]]:
    """Each way to run a step, and what removes gradients."""
    make, shape = PROBLEMS[problem]
    x, y = torch.rand(shape), torch.randint(10, shape[:1])
    torch.manual_seed(0)
    bare, bare_loss = make(), nn.CrossEntropyLoss()
    model, other = extend(make()), extend(make())
    lossfunc = extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(other(x), y), other, lossfunc, extension)
    weights = dict(bare.named_parameters())

    def plain() -> None:
        bare_loss(bare(x), y).backward()

    def eager() -> None:
        with backpack(extension):
            lossfunc(model(x), y).backward()

    def of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = bare_loss(functional_call(bare, weights, (x[None],)), y[None])
        return found

    individual = vmap(grad(of_one), in_dims=(None, 0, 0))
    found: dict[str, Callable[[], object]] = {
        "plain": plain,
        "eager": eager,
        "captured": lambda: step(x, y),
        "guard": lambda: step.holds(x, y),
    }
    if is_individual:
        found["vmap(grad)"] = lambda: individual(weights, x, y)
    for _ in range(70):  # so that few of the steps that are measured are compared with the engine
        step(x, y)

    def forget() -> None:  # results stay, as in a training loop: the next ones take their memory
        for parameter in (*bare.parameters(), *model.parameters(), *other.parameters()):
            parameter.grad = None

    return found, forget


def alternate(
    steps: Mapping[str, Callable[[], object]], forget: Callable[[], None], seconds: float
) -> dict[str, float]:
    """The 10 % quantile of the time of each, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 10:
        for name, step in steps.items():
            start = time.perf_counter()
            result = step()
            times[name].append(time.perf_counter() - start)
            del result
            forget()
    return {name: sorted(found)[len(found) // 10] for name, found in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", nargs="*", default=[*PROBLEMS], choices=[*PROBLEMS])
    parser.add_argument("--quantity", nargs="*", default=["BatchGrad"])
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    columns = ("eager", "captured", "guard", "vmap(grad)")
    print(f"{'':24}{'plain, µs':>12}" + "".join(f"{name:>12}" for name in columns))
    for problem in given.problem:
        for quantity in given.quantity:
            extension = getattr(known, quantity)()
            found = alternate(*ways(problem, extension, quantity == "BatchGrad"), given.seconds)
            plain = found["plain"]
            cells = [f"{found[n] / plain:12.2f}" if n in found else f"{'':12}" for n in columns]
            print(f"{problem + ', ' + quantity:24}{plain * 1e6:12.0f}{''.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
