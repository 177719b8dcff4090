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


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--seconds", type=float, default=15.0, help="of measuring")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = nn.Sequential(*[Block(128) for _ in range(2)], nn.Flatten(), nn.Linear(32 * 128, 10))
    extended = extend(copy.deepcopy(plain))
    x, lossfunc = torch.randn(8, 32, 128), extend(nn.CrossEntropyLoss())
    y = torch.randint(10, (8,))
    loss: nn.Module = nn.CrossEntropyLoss()
    compiled, extended = copy.deepcopy(plain), extend(copy.deepcopy(plain))
    both = extend(copy.deepcopy(plain))
    ways: dict[str, tuple[nn.Module, Callable[..., Tensor]]] = {
        "plain": (plain, plain),
        "extended": (extended, extended),
        "plain, compiled": (compiled, torch.compile(compiled, backend=arguments.backend)),
        "extended, compiled": (
            both,
            torch.compile(both, backend=arguments.backend, fullgraph=True),
        ),
    }

    def step(name: str) -> Callable[[], None]:
        return lambda: (loss if "plain" in name else lossfunc)(ways[name][1](x), y).backward()

    def individual(name: str) -> Callable[[], None]:
        def run() -> None:
            with backpack(BatchGrad(), check="never"):
                step(name)()

        return run

    graphs = {}
    for name, (model, _) in ways.items():
        if "compiled" in name:
            found = torch._dynamo.explain(model)(x)
            graphs[name] = found.graph_count, found.graph_break_count
    torch._dynamo.reset()
    runs = {name: step(name) for name in ways}
    runs |= {f"{n}, BatchGrad": individual(n) for n in ways if n.startswith("extended")}

    def forget(name: str) -> None:
        for p in ways[name.removesuffix(", BatchGrad")][0].parameters():
            p.grad = p.grad_batch = None

    for run in runs.values():
        run()
    times = alternate(runs, arguments.seconds, "cpu", forget)
    print(f"{'':30}{'ms':>8}{'graphs':>8}{'breaks':>8}")
    for name in runs:
        made = "".join(f"{count:8d}" for count in graphs.get(name, ()))
        print(f"{name:30}{times.best(name) * 1e3:8.2f}{made}")


if __name__ == "__main__":
    main()
