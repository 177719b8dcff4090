"""What a captured step costs: ``python -m benchmarks.captured``.

Plain passes that a step takes: by the engine, as a recorded graph, with ``--compile`` compiled by
Inductor (minutes), and ``vmap(grad)``, eager and compiled, which gives individual gradients alone;
and ``backpack-for-pytorch`` where it is installed. All ways alternate in one process, the 10 %
quantile counts. The guard is a part of the step, and is shown by itself. Below, the mebibytes of
tensors that live at the peak of a step of each kind, above weights and batch: of a step after
another one, whose results are still there.

With ``--device cuda``, also as CUDA graphs, each step waited for; and results of captured steps are
compared with the engine's. The memory that a graph keeps for itself is not counted.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.profiler import ProfilerActivity, profile

from backpack_capture import CapturedStep, capture
from backpack_core import backpack, extend
from backpack_core import extensions as known
from benchmarks.measure import forget_all, machine, synchroniser
from benchmarks.peers import Unsupported, incumbent
from benchmarks.problems import Problem, find
from benchmarks.quantities import QUANTITIES


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


class Encoder(nn.Module):
    """One encoder layer on ten positions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 10, 32]`` to ``[N, 10]``."""
        result: Tensor = self.head(self.layer(x).mean(1))
        return result


PROBLEMS: Mapping[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem("3x64", lambda: chain(3, 64, nn.Sigmoid), (64,), 10, 32, 32),
        Problem("16x32", lambda: chain(16, 32, nn.Tanh), (32,), 10, 8, 8),
        Problem("residual", Residual, (32,), 10, 32, 32),
        Problem("encoder", Encoder, (10, 32), 10, 16, 16),
        Problem("cnn", cnn, (1, 28, 28), 10, 16, 16),
        *map(find, ("mlp", "3c3d", "gpt2", "llama")),
    )
}
Step = Callable[[], object]


def ways(problem: Problem, name: str, compiles: bool) -> tuple[dict[str, Step], list[nn.Module]]:
    """Each way to run a step, and the models."""
    x, y = problem.data(problem.batch)
    bare, bare_loss = problem.net(), nn.CrossEntropyLoss()
    found, models = ours(problem, name, x, y, compiles)
    if name == "BatchGrad":
        found |= by_functions(problem.name, bare, x, y, compiles)
    try:
        found["incumbent"], its = incumbent(problem, QUANTITIES[name], problem.batch)
    except (Unsupported, KeyError):
        its = nn.Module()
    return {"plain": lambda: bare_loss(bare(x), y).backward(), **found}, [bare, *models, its]


def ours(
    problem: Problem, name: str, x: Tensor, y: Tensor, compiles: bool
) -> tuple[dict[str, Step], list[nn.Module]]:
    """A step by the engine, and captured ones; each has a model of its own."""
    lossfunc, extension = extend(nn.CrossEntropyLoss()), getattr(known, name)()
    models = [extend(problem.net()) for _ in range(4)]
    model, other, third, fourth = models

    def captured(net: nn.Module, word: str | None) -> CapturedStep:
        step = capture(lambda x, y: lossfunc(net(x), y), net, lossfunc, extension, compile=word)
        settle(lambda: step(x, y))
        if step.wait():
            settle(lambda: step(x, y))
        return step

    def eager() -> None:
        with backpack(extension):
            lossfunc(model(x), y).backward()

    settle(eager)
    step = captured(other, None)
    found: dict[str, Step] = {
        "engine": eager,
        "captured": lambda: step(x, y),
        "guard": lambda: step.holds(x, y),
    }
    if problem.device != "cpu":
        graphs = captured(fourth, "cudagraphs")
        found["CUDA graph"] = lambda: graphs(x, y)
        for way, net in (("captured", other), ("CUDA graph", fourth)):
            worst = difference(found[way], net, eager, model, extension.savefield)
            print(f"{problem.name}, {name}: {way} differs from the engine by {worst:.1e}")
    if compiles:
        compiled = captured(third, "inductor")
        found["Inductor"] = lambda: compiled(x, y)
        print(f"{problem.name}, {name}: {compiled.report().splitlines()[-1].split(', ')[-1]}")
    return found, models


def by_functions(
    name: str, net: nn.Module, x: Tensor, y: Tensor, compiles: bool
) -> dict[str, Step]:
    """Individual gradients by ``torch.func``, and compiled if torch can."""
    individual = of_functions(net, x, y)
    if compiles:
        compiled = torch.compile(individual, fullgraph=True)
        try:
            compiled()
        except Exception as error:  # as of operations that have no second derivative
            why = " ".join(str(error).split())
            print(f"{name}, vmap(grad): not compiled: {why:.140}")
        else:
            return {"vmap(grad)": individual, "compiled": compiled}
    return {"vmap(grad)": individual}


def difference(step: Step, net: nn.Module, right: Step, model: nn.Module, field: str) -> float:
    """The largest difference of a gradient or a result, relative to its largest entry."""
    worst = 0.0
    for run, its in ((step, net), (right, model)):
        its.zero_grad()
        torch.manual_seed(0)
        run()
    for one, other in zip(net.parameters(), model.parameters(), strict=True):
        for name in ("grad", field):
            values = (getattr(one, name), getattr(other, name))
            pairs = zip(*(v if isinstance(v, list | tuple) else [v] for v in values), strict=True)
            for ours, expected in pairs:
                size = expected.abs().max().clamp(min=1e-12)
                worst = max(worst, float((ours - expected).abs().max() / size))
    return worst


def settle(step: Step) -> None:
    """Run so many steps that few of the later ones are measured, or compared; 10 of slow ones."""
    end = time.perf_counter() + 5.0
    for number in range(70):
        if number < 10 or time.perf_counter() < end:
            step()


def of_functions(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Individual gradients by ``torch.func``."""
    weights: dict[str, Tensor] = dict(model.named_parameters())

    def of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(model, weights, (x[None],))
        return nn.functional.cross_entropy(out, y[None])

    individual = vmap(grad(of_one), in_dims=(None, 0, 0))
    return lambda: individual(weights, x, y)


def alternate(
    steps: Mapping[str, Step],
    models: Sequence[nn.Module],
    seconds: float,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The 10 % quantile of the time of each, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 10:
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            result = step()
            wait()
            times[name].append(time.perf_counter() - start)
            del result
            for model in models:  # results stay: the next ones take their memory
                model.zero_grad()
    return {name: sorted(found)[len(found) // 10] for name, found in times.items()}


def peak(step: Step, models: Sequence[nn.Module]) -> float:
    """Mebibytes of tensors at the peak of a step, whose results take the place of others."""
    by_number = {str(number): model for number, model in enumerate(models)}
    for number in by_number:
        forget_all(by_number, number)
    if next(models[0].parameters()).is_cuda:
        return peak_of_device(step, models)
    held, highest = 0, 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        for _ in range(2):
            result = step()
            del result
            for model in models:
                model.zero_grad()
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest / 2**20


def peak_of_device(step: Step, models: Sequence[nn.Module]) -> float:
    """The same on a GPU, by the counts of its allocator."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        result = step()
        del result
        for model in models:
            model.zero_grad()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


COLUMNS = (
    "engine",
    "captured",
    "CUDA graph",
    "guard",
    "Inductor",
    "vmap(grad)",
    "compiled",
    "incumbent",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", nargs="*", default=[*PROBLEMS], choices=[*PROBLEMS])
    parser.add_argument("--quantity", nargs="*", default=["BatchGrad"])
    parser.add_argument("--compile", action="store_true", help="with Inductor, which takes minutes")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--device", default="cpu", help="where nets and data are (default: cpu)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    warnings.simplefilter("ignore")
    wait = synchroniser(given.device) or (lambda: None)
    print(machine(given.device))
    print(f"{'':28}{'plain, µs':>12}" + "".join(f"{name:>12}" for name in COLUMNS))

    def at(name: str) -> Problem:
        return replace(PROBLEMS[name], device=given.device)

    for problem in given.problem:
        for quantity in given.quantity:
            steps, models = ways(at(problem), quantity, given.compile)
            found = alternate(steps, models, given.seconds, wait)
            plain = found["plain"]
            cells = [f"{found[n] / plain:12.2f}" if n in found else f"{'':12}" for n in COLUMNS]
            print(f"{problem + ', ' + quantity:28}{plain * 1e6:12.0f}{''.join(cells)}", flush=True)
            del steps["guard"]
            # The lower of two: a captured step may be one that is compared with the engine.
            peaks = {n: min(peak(step, models), peak(step, models)) for n, step in steps.items()}
            cells = [f"{peaks[n]:12.2f}" if n in peaks else f"{'':12}" for n in COLUMNS]
            print(f"{'  peak, MiB':28}{peaks['plain']:12.2f}{''.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
