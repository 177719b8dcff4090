"""The main job on real data. Needs scikit-learn and the families of layers and quantities.

One backward pass computes individual gradients and the exact and Monte-Carlo diagonals of the
generalised Gauss-Newton matrix, for a small convolutional net on the 1797 digits that scikit-learn
ships. Each number is compared with plain autograd.

Run: ``python examples/demo.py``, or ``make demo``
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from backpack_core import Extension, backpack, disable, extend
from backpack_core.extensions import BatchGrad, DiagGGNExact, DiagGGNMC
from backpack_core.plugins.registry import registry

MC_SAMPLES = 2
TOLERANCE = 1e-9  # of the exact quantities, in float64
MC_TOLERANCE = 0.1  # of the Monte-Carlo trace, with 1797 · 2 draws


@dataclass(frozen=True)
class Problem:
    """A model, a loss, and one batch with all the data."""

    model: nn.Sequential
    lossfunc: nn.CrossEntropyLoss
    images: Tensor
    labels: Tensor

    def loss(self) -> Tensor:
        """The mean loss of the batch."""
        value: Tensor = self.lossfunc(self.model(self.images), self.labels)
        return value


def load_digits() -> tuple[Tensor, Tensor]:
    """The digits of scikit-learn: images ``[1797, 1, 8, 8]`` in [0, 1], and labels."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise SystemExit("The demo needs scikit-learn: pip install scikit-learn") from error
    data = datasets.load_digits()
    images = torch.tensor(data.images, dtype=torch.float64).unsqueeze(1) / 16
    return images, torch.tensor(data.target)


def make_problem() -> Problem:
    """A convolutional net of ordinary layers, extended."""
    torch.manual_seed(0)
    images, labels = load_digits()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(256, 10),
    ).to(images.dtype)
    return Problem(extend(model), extend(nn.CrossEntropyLoss()), images, labels)


def individual_gradients(problem: Problem) -> dict[str, Tensor]:
    """Individual gradients by autograd alone, in a loop over the samples."""
    names, parameters = zip(*problem.model.named_parameters(), strict=True)
    total = len(problem.labels)
    rows = []
    with disable():
        for n in range(total):
            output = problem.model(problem.images[n : n + 1])
            loss = problem.lossfunc(output, problem.labels[n : n + 1]) / total
            rows.append(torch.autograd.grad(loss, parameters))
    return {name: torch.stack(g) for name, g in zip(names, zip(*rows, strict=True), strict=True)}


def ggn_diagonal(problem: Problem) -> dict[str, Tensor]:
    """The diagonal by autograd alone: explicit Jacobians and loss Hessians, in batches."""
    parameters = {n: p.detach() for n, p in problem.model.named_parameters()}
    result = {n: torch.zeros_like(p) for n, p in parameters.items()}

    def output(values: dict[str, Tensor], image: Tensor) -> Tensor:
        logits: Tensor = functional_call(problem.model, values, image.unsqueeze(0))
        return logits.squeeze(0)

    jacobian = vmap(jacrev(output), in_dims=(None, 0))
    with disable():
        for images in problem.images.split(128):
            probabilities = problem.model(images).detach().softmax(1)
            hessian = torch.diag_embed(probabilities)
            hessian -= torch.einsum("nc,nd->ncd", probabilities, probabilities)
            for name, block in jacobian(parameters, images).items():
                product = torch.einsum("ncd,nd...->nc...", hessian, block)
                result[name] += (block * product).sum((0, 1)) / len(problem.labels)
    return result


def relative_deviation(ours: Tensor, theirs: Tensor) -> float:
    """Largest deviation, relative to the largest entry."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def slowdown(problem: Problem, extension: Extension, repetitions: int = 5) -> float:
    """Time of forward and backward with one extension, relative to a plain gradient."""

    def plain() -> None:
        with disable():
            loss = problem.loss()
        loss.backward()

    def extended() -> None:
        loss = problem.loss()
        with backpack(extension):
            loss.backward()

    ratios = [_seconds(extended) / _seconds(plain) for _ in range(repetitions + 1)]
    return statistics.median(ratios[1:])


def _seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def rows(problem: Problem, extensions: list[Extension]) -> Iterator[tuple[list[str], bool]]:
    """One backward pass, and a row of the table for every parameter and quantity."""
    loss = problem.loss()
    with backpack(*extensions):
        loss.backward()
    diagonal = ggn_diagonal(problem)
    oracles = {
        "grad_batch": individual_gradients(problem),
        "diag_ggn_exact": diagonal,
        "diag_ggn_mc": diagonal,
    }
    times = {e.savefield: slowdown(problem, e) for e in extensions}
    for name, parameter in problem.model.named_parameters():
        for extension in extensions:
            field = extension.savefield
            ours, theirs = getattr(parameter, field), oracles[field][name]
            if field == "diag_ggn_mc":
                deviation, bound = abs(float(ours.sum() / theirs.sum()) - 1), MC_TOLERANCE
            else:
                deviation, bound = relative_deviation(ours, theirs), TOLERANCE
            summary = ours.norm() if field == "grad_batch" else ours.sum()
            shape = "×".join(map(str, ours.shape))
            cells = [name, field, shape, f"{summary:.4e}", f"{deviation:.1e}"]
            yield [*cells, f"{times[field]:.1f}×"], deviation <= bound


def print_table(header: list[str], lines: list[list[str]]) -> None:
    """Print cells in aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for line in (header, ["─" * w for w in widths], *lines):
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())


def print_providers(problem: Problem, extensions: list[Extension]) -> None:
    """Print which plugin and distribution provided each rule and extension."""
    lines = []
    for module in (*problem.model, problem.lossfunc):
        found = registry.resolve(module)
        rule = "none: read at operations" if found.is_fallback else type(found.rule).__name__
        where = found.provenance
        lines.append([type(module).__name__, rule, where.plugin, str(where)])
    for extension in extensions:
        claim = registry.extensions[type(extension).__name__][0]
        where = claim.provenance
        lines.append([type(extension).__name__, "extension", where.plugin, str(where)])
    unique = list(dict.fromkeys(map(tuple, lines)))
    print_table(["used", "provided as", "plugin", "distribution"], [list(line) for line in unique])


def main() -> None:
    """Run the demo, and exit with an error if anything does not agree with autograd."""
    problem = make_problem()
    extensions = [BatchGrad(), DiagGGNExact(), DiagGGNMC(mc_samples=MC_SAMPLES)]
    count = sum(p.numel() for p in problem.model.parameters())
    print(f"{len(problem.labels)} digits, {count} parameters, one backward pass in float64\n")
    lines, verdicts = zip(*rows(problem, extensions), strict=True)
    print_table(["parameter", "quantity", "shape", "norm or trace", "deviation", "time"], [*lines])
    print(
        "\ndeviation: largest, relative to autograd (of the trace for Monte Carlo, which agrees in "
        f"expectation;\n{MC_SAMPLES} samples per digit). time: of that quantity alone, relative to "
        "a plain gradient.\n"
    )
    print_providers(problem, extensions)
    if not all(verdicts):
        raise SystemExit("A quantity is off.")
    print("\nEverything agrees with autograd.")


if __name__ == "__main__":
    main()
