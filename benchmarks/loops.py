"""Whole training loops, by four ways: ``python -m benchmarks.loops``.

A small PINN (the Helmholtz equation on an interval) that is trained with the norms of the gradients
of its points, and private training on the digits of scikit-learn: clipped sums and noise. Each way
begins with the same weights, and takes the same batches. Seconds include recording and, for
Inductor, compiling, which runs beside; what a step took at the end is shown as well. With
``--clock cpu``, only this process counts, and not the one that compiles.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from backpack_capture import capture
from backpack_core import backpack, extend
from backpack_core.extensions import BatchL2Grad, ClippedSumGrad
from benchmarks.measure import CLOCKS, Clock

Step = Callable[[Tensor, Tensor], Tensor]
WAYS = ("engine", "captured", "inductor", "torch.func")
LIMIT = 1.0  # the norm to which gradients of samples are clipped


def _step(way: str, function: Step, modules: tuple[nn.Module, ...], extension: object) -> Step:
    """A step by this library."""
    if way != "engine":
        compile = "inductor" if way == "inductor" else None
        return capture(function, *modules, extension, compile=compile)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with backpack(extension):  # type: ignore[arg-type]
            loss = function(x, y)
            loss.backward()
        return loss.detach()

    return step


class Net(nn.Module):
    """Three hidden layers of width 32, with their second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 32), nn.Linear(32, 32), nn.Linear(32, 32)])
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``u''(x) + u(x)`` of the net ``u``, by the chain rule. ``[N, 1]`` to ``[N, 1]``."""
        first, *others = self.layers
        weight: Tensor = first.weight.T  # type: ignore[assignment]
        value = torch.tanh(first(x))
        slope = (1 - value * value) * weight
        bend = -2 * value * slope * weight
        for layer in others:
            weight = layer.weight.T  # type: ignore[assignment]
            value = torch.tanh(layer(value))
            slope, bend = slope @ weight, bend @ weight
            inner = 1 - value * value
            bend = inner * bend - 2 * value * inner * slope * slope
            slope = inner * slope
        out: Tensor = bend @ self.head.weight.T + self.head(value)
        return out


def pinn(way: str, steps: int, clock: Clock) -> tuple[list[float], float]:
    """Seconds after each step, and the last loss."""
    torch.manual_seed(0)
    model, lossfunc = Net(), nn.MSELoss()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    if way == "torch.func":
        step = _norms_by_functions(model)
    else:
        extend(model), extend(lossfunc)
        step = _step(way, lambda x, y: lossfunc(model(x), y), (model, lossfunc), BatchL2Grad())

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.rand(64, 1)
        return x, (1 - torch.pi**2) * torch.sin(torch.pi * x)

    return _train(step, optimiser, batch, lambda: None, steps, clock)


def _norms_by_functions(model: nn.Module) -> Step:
    weights = dict(model.named_parameters())

    def of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = (functional_call(model, weights, (x[None],)) - y).square().mean()
        return loss, loss

    individual = vmap(grad(of_one, has_aux=True), in_dims=(None, 0, 0))

    def step(x: Tensor, y: Tensor) -> Tensor:
        found, losses = individual({n: w.detach() for n, w in weights.items()}, x, y)
        for name, weight in weights.items():
            weight.batch_l2 = found[name].flatten(1).square().sum(1)  # type: ignore[attr-defined]
            weight.grad = found[name].mean(0)
        result: Tensor = losses.mean()
        return result

    return step


def digits(way: str, steps: int, clock: Clock) -> tuple[list[float], float]:
    """Seconds after each step, and the last loss."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    if way == "torch.func":
        step = _clipped_by_functions(model)
    else:
        extend(model), extend(lossfunc)
        extension = ClippedSumGrad(LIMIT)
        step = _step(way, lambda x, y: lossfunc(model(x), y), (model, lossfunc), extension)

    def batch() -> tuple[Tensor, Tensor]:
        some = torch.randint(len(images), (64,))
        return images[some], labels[some]

    def privatise() -> None:
        for parameter in model.parameters():
            clipped: Tensor = parameter.grad_clipped  # type: ignore[attr-defined]
            parameter.grad = (clipped + 0.5 * LIMIT * torch.randn_like(clipped)) / 64

    return _train(step, optimiser, batch, privatise, steps, clock)


def _clipped_by_functions(model: nn.Module) -> Step:
    weights = dict(model.named_parameters())

    def of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = functional_call(model, weights, (x[None],))
        loss = nn.functional.cross_entropy(out, y[None])
        return loss, loss

    individual = vmap(grad(of_one, has_aux=True), in_dims=(None, 0, 0))

    def step(x: Tensor, y: Tensor) -> Tensor:
        found, losses = individual({n: w.detach() for n, w in weights.items()}, x, y)
        squares = [g.flatten(1).square().sum(1) for g in found.values()]
        factors = (LIMIT / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
        for name, weight in weights.items():
            weight.grad_clipped = torch.tensordot(factors, found[name], 1)  # type: ignore[attr-defined]
        result: Tensor = losses.sum()
        return result

    return step


def _train(
    step: Step,
    optimiser: torch.optim.Optimizer,
    batch: Callable[[], tuple[Tensor, Tensor]],
    between: Callable[[], None],
    steps: int,
    clock: Clock,
) -> tuple[list[float], float]:
    times, loss, start = list[float](), torch.tensor(0.0), clock()
    for _ in range(steps):
        loss = step(*batch())
        between()
        optimiser.step()
        optimiser.zero_grad()
        times.append(clock() - start)
    return times, float(loss)


LOOPS = {"pinn": pinn, "digits": digits}


def main() -> None:
    """Print seconds of each loop and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", nargs="*", default=[*LOOPS], choices=[*LOOPS])
    parser.add_argument("--way", nargs="*", default=[*WAYS], choices=WAYS)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: this process alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'':24}{'seconds':>10}{'last steps, µs':>16}{'last loss':>12}")
    for loop in given.loop:
        for way in given.way:
            times, loss = LOOPS[loop](way, given.steps, CLOCKS[given.clock])
            tail = times[-min(1000, len(times) // 2) :]
            last = 1e6 * (tail[-1] - tail[0]) / max(1, len(tail) - 1)
            print(f"{loop + ', ' + way:24}{times[-1]:10.1f}{last:16.0f}{loss:12.4g}", flush=True)


if __name__ == "__main__":
    main()
