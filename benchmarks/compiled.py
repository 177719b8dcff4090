"""What ``extend`` costs under ``torch.compile``: graphs, breaks, and time of plain passes.

Run as ``python -m benchmarks.compiled``; ``--backend inductor`` needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad
from benchmarks.measure import alternate


class Block(nn.Module):
    """Attention by hand, and two layers, with residuals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, h: Tensor) -> Tensor:
        """``[N, T, D]`` to the same."""
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + (q @ k.transpose(1, 2)).softmax(-1) @ v
        result: Tensor = h + self.mlp(h)
        return result


class Way:
    """A model, plain or extended, as it is or compiled."""

    def __init__(self, name: str, like: nn.Module, backend: str) -> None:
        self.is_compiled, is_extended = "compiled" in name, "extended" in name
        self.model, self.lossfunc = copy.deepcopy(like), nn.CrossEntropyLoss()
        if is_extended:
            extend(self.model), extend(self.lossfunc)
        self.graphs = ""
        self._run: Callable[[Tensor], Tensor] = self.model
        if self.is_compiled:
            found = torch._dynamo.explain(self.model)(X)
            self.graphs = f"{found.graph_count:8d}{found.graph_break_count:8d}"
            self._run = torch.compile(self.model, backend=backend, fullgraph=is_extended)

    def step(self) -> None:
        """A forward and a backward pass."""
        self.lossfunc(self._run(X), Y).backward()

    def individual(self) -> None:
        """The same with individual gradients."""
        with backpack(BatchGrad(), check="never"):
            self.step()

    def forget(self) -> None:
        """Drop what was stored."""
        for p in self.model.parameters():
            p.grad = p.grad_batch = None  # type: ignore[attr-defined]


X, Y = torch.randn(8, 32, 128), torch.randint(10, (8,))
NAMES = ("plain", "extended", "plain, compiled", "extended, compiled")


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--seconds", type=float, default=15.0, help="of measuring")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain = nn.Sequential(*[Block(128) for _ in range(2)], nn.Flatten(), nn.Linear(32 * 128, 10))
    ways = {name: Way(name, plain, arguments.backend) for name in NAMES}
    torch._dynamo.reset()
    runs = {name: way.step for name, way in ways.items()}
    whose = dict(ways)
    for name, way in ways.items():
        if name.startswith("extended"):
            runs[f"{name}, BatchGrad"], whose[f"{name}, BatchGrad"] = way.individual, way
    for run in runs.values():
        run()
    times = alternate(runs, arguments.seconds, "cpu", lambda name: whose[name].forget())
    print(f"{'':30}{'ms':>8}{'graphs':>8}{'breaks':>8}")
    for name in runs:
        graphs = ways[name].graphs if name in ways else ""
        print(f"{name:30}{times.best(name) * 1e3:8.2f}{graphs}")


if __name__ == "__main__":
    main()
