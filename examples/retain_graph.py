"""The GGN diagonal of an auto-encoder in 1, 4, 16 and 64 backward passes through one graph.

The exact GGN diagonal carries one column for each output of the model, and an auto-encoder has as
many outputs as inputs. ``retain_graph=True`` keeps what a backward pass needs, so several passes
can each take a slice of the outputs: less memory, same result. Every setting runs in a separate
process, which has its own peak memory. The plot shows memory and time against the number of passes.

Run: ``python examples/retain_graph.py [--size 32] [--plot retain_graph.png]``
"""

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact
from backpack_layers.modules import Slicing

Result = tuple[list[Tensor], float, float]


def make_problem(size: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """A convolutional auto-encoder, its loss, and five images."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Sigmoid())
    decoder = nn.Sequential(nn.ConvTranspose2d(10, 3, 3), nn.Flatten())
    images = torch.rand(5, 3, size, size)
    return extend(nn.Sequential(encoder, decoder)), extend(nn.MSELoss()), images


def diag_ggn(size: int, passes: int) -> list[Tensor]:
    """The diagonal, with the outputs of the model split over ``passes`` backward passes."""
    model, lossfunc, images = make_problem(size)
    target = images.flatten(1)
    outputs = target.shape[1]
    if outputs % passes:
        raise ValueError(f"{passes} passes do not divide {outputs} outputs.")
    length = outputs // passes
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    reconstruction = model(images)
    for start in range(0, outputs, length):
        window = (slice(None), slice(start, start + length))
        loss = lossfunc(extend(Slicing(window))(reconstruction), target[window])
        keep = start + length < outputs
        # All columns of the slice at once, to show what they cost. Without chunk_size, no more go
        # together than the memory budget allows.
        with backpack(DiagGGNExact(chunk_size=length)):
            loss.backward(retain_graph=keep)
        for diagonal, parameter in zip(total, parameters, strict=True):
            # The mean over a slice divides by its length instead of by the number of outputs.
            diagonal += parameter.diag_ggn_exact / passes
    return total


def peak_memory() -> float:
    """The peak memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, ru_maxrss is inherited from the parent process
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(job: tuple[int, int]) -> Result:
    """The diagonal, seconds, and additional peak memory in MiB."""
    diag_ggn(4, 1)  # some modules are imported at the first pass: with torch 2.6, the compiler
    before = peak_memory()
    start = time.perf_counter()
    diagonal = diag_ggn(*job)
    seconds = time.perf_counter() - start
    return diagonal, seconds, peak_memory() - before


def measure_all(size: int, settings: Sequence[int]) -> list[Result]:
    """Measure every setting in a fresh process."""
    context = multiprocessing.get_context("spawn")
    results = []
    for number, passes in enumerate(settings):
        show_progress(f"{passes} backward passes", number, len(settings))
        with context.Pool(1) as pool:
            results.append(pool.apply(measure, ((size, passes),)))
    show_progress("", len(settings), len(settings))
    return results


def show_progress(what: str, done: int, total: int, width: int = 30) -> None:
    """Show a bar on a terminal, and nothing elsewhere."""
    if sys.stderr.isatty():
        bar = "#" * (width * done // total)
        end = "\n" if done == total else ""
        print(f"\r[{bar:{width}}] {done}/{total} {what:20}", end=end, file=sys.stderr, flush=True)


def plot(settings: Sequence[int], results: Sequence[Result], path: Path) -> None:
    """Peak memory and time against the number of passes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.plot(settings, [memory for _, _, memory in results], "o-")
    left.set(xscale="log", xlabel="backward passes", ylabel="peak memory [MiB]")
    right.plot(settings, [seconds for _, seconds, _ in results], "o-")
    right.set(xscale="log", xlabel="backward passes", ylabel="time [s]")
    for axes in (left, right):
        axes.set_xticks(settings, labels=[str(s) for s in settings])
        axes.set_ylim(bottom=0)
    figure.suptitle("Exact GGN diagonal of an auto-encoder")
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measure, compare, plot."""
    parser = argparse.ArgumentParser(description="GGN diagonal in several backward passes")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    parser.add_argument("--plot", type=Path, default=Path("retain_graph.png"))
    options = parser.parse_args(arguments)
    settings = [1, 4, 16, 64]
    results = measure_all(options.size, settings)
    for passes, (diagonal, seconds, memory) in zip(settings, results, strict=True):
        print(f"{passes:3d} backward passes: {memory:8.1f} MiB, {seconds:6.2f} s")
        pairs = zip(diagonal, results[0][0], strict=True)
        if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in pairs):
            raise SystemExit(f"The diagonal from {passes} passes differs.")
    print("All diagonals agree.")
    plot(settings, results, options.plot)
    print(f"plot: {options.plot}")
    return results


if __name__ == "__main__":
    main()
