"""Loops as users write them, and which passes repeat a recording: ``python -m benchmarks.repeats``.

A line for each loop: how many of its last passes repeated what an earlier one computed, and the
time of a step as a multiple of the same step without a block. All loops alternate in one process.
``--names compat`` runs those of the incumbent's interface on this project instead (``compat`` must
be installed, as in ``.venv``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import backpack_core
import backpack_core.extensions
from benchmarks.measure import alternate
from benchmarks.peers import Step

WARM, LAST, SECONDS = 40, 20, 10.0
Loss = Callable[[nn.Module, nn.Module], Tensor]


class Tokens(nn.Module):
    """Tokens with a table of positions; returns logits of the last token, or of all."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30, 32), nn.Embedding(12, 32)
        self.hidden, self.head, self.is_last = nn.Linear(32, 32), nn.Linear(32, 10), is_last

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[N, 10]`` or ``[N T, 10]``."""
        where = torch.arange(tokens.shape[1]).unsqueeze(0)
        h = torch.tanh(self.hidden(self.words(tokens) + self.positions(where)))
        last = torch.randint(tokens.shape[1], (len(tokens),))
        picked: Tensor = h[torch.arange(len(h)), last] if self.is_last else h[:, :].flatten(0, 1)
        return self.head(picked)  # type: ignore[no-any-return]


def perceptron() -> nn.Module:
    """Three layers of width 64."""
    return nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )


def of_data(model: nn.Module, lossfunc: nn.Module) -> Tensor:
    """The loss of 32 samples."""
    loss: Tensor = lossfunc(model(torch.randn(32, 64)), torch.randint(10, (32,)))
    return loss


def of_tokens(model: nn.Module, lossfunc: nn.Module) -> Tensor:
    """The loss of 8 sequences."""
    out = model(torch.randint(30, (8, 6)))
    loss: Tensor = lossfunc(out, torch.randint(10, out.shape[:1]))
    return loss


# By name: the model, the loss, the extension, and arguments of ``backpack(...)``.
LOOPS: dict[str, tuple[Callable[[], nn.Module], Loss, str, dict[str, Any]]] = {
    "gradients": (perceptron, of_data, "BatchGrad", {}),
    "exact diagonal": (perceptron, of_data, "DiagGGNExact", {}),
    "factors": (perceptron, of_data, "KFAC", {}),
    "a hook": (perceptron, of_data, "BatchGrad", {"extension_hook": lambda module: None}),
    "an observer": (perceptron, of_data, "BatchGrad", {"observer": lambda view: None}),
    "last token": (lambda: Tokens(True), of_tokens, "BatchL2Grad", {}),
    "all tokens": (lambda: Tokens(False), of_tokens, "BatchL2Grad", {}),
    "all tokens, factors": (lambda: Tokens(False), of_tokens, "KFAC", {}),
}
BY_NAMES = ("core", "compat")


def steps(name: str, package: Any, extensions: Any) -> tuple[Callable[[], int], Callable[[], Any]]:
    """A step in a block, which says whether it repeated a recording; and one without a block."""
    make, loss_of, kind, options = LOOPS[name]
    plain, plain_loss = make(), nn.CrossEntropyLoss()
    model, lossfunc = package.extend(make()), package.extend(nn.CrossEntropyLoss())

    def step() -> int:
        model.zero_grad()
        loss = loss_of(model, lossfunc)
        with package.backpack(getattr(extensions, kind)(), **options) as block:
            loss.backward()
        return int(block._history["repeated a recording"])

    def without() -> None:
        plain.zero_grad()
        loss_of(plain, plain_loss).backward()

    return step, without


def ten(step: Callable[[], Any]) -> Step:
    """Ten steps, so that caches are warm."""

    def steps() -> None:
        for _ in range(10):
            step()

    return steps


def main() -> None:
    """Run the loops, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", choices=BY_NAMES, default="core")
    package, extensions = backpack_core, backpack_core.extensions
    chosen = [*LOOPS]
    if parser.parse_args().names == "compat":
        import backpack as package  # type: ignore[no-redef]
        import backpack.extensions as extensions  # type: ignore[no-redef]

        chosen = [name for name in chosen if name != "an observer"]  # it has no such argument
    torch.set_num_threads(1)
    torch.manual_seed(0)
    repeated, turns = dict[str, int](), dict[str, Step]()
    for name in chosen:
        step, without = steps(name, package, extensions)
        for _ in range(WARM):
            step()
        repeated[name] = sum(step() for _ in range(LAST))
        turns |= {name: ten(step), f"{name} without": ten(without)}
    times = alternate(turns, SECONDS, "cpu", lambda name: None)
    print(f"{'loop':24}{f'repeated of {LAST}':>16}{'x without':>12}")
    for name, count in repeated.items():
        print(f"{name:24}{count:>16}{times.ratio(name, f'{name} without'):>12.2f}")


if __name__ == "__main__":
    main()
