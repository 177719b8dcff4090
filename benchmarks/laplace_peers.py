"""The backend for laplace-torch beside its own: seconds of CPU time for a fit, in one run.

Run: ``.venv-bench/bin/python -m benchmarks.laplace_peers``
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from backpack_secondorder.laplace import laplace_backend


def problems() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """A fully connected net, and a convolutional one."""
    torch.manual_seed(0)
    body = (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    layers = (nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten())
    conv = nn.Sequential(*layers, nn.Linear(128, 10))
    return {
        "linear": (nn.Sequential(*body), torch.randn(512, 64)),
        "conv": (conv, torch.randn(512, 1, 8, 8)),
    }


def seconds(model: nn.Module, x: torch.Tensor, backend: Any, **settings: Any) -> float:
    """CPU time of the best of three fits over 512 samples."""
    data = DataLoader(TensorDataset(x, torch.randint(0, 10, (512,))), batch_size=128)
    extra = {} if backend is None else {"backend": backend}
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        Laplace(model, "classification", **settings, **extra).fit(data)
        best = min(best, time.process_time() - start)
    return best


def main() -> None:
    """Print a row for each structure."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'net':8}{'weights':12}{'structure':10}{'theirs':>9}{'here':>9}{'ratio':>7}")
    for name, (model, x) in problems().items():
        for subset in ("all", "last_layer"):
            for structure in ("diag", "kron", "full"):
                settings = {"subset_of_weights": subset, "hessian_structure": structure}
                theirs = seconds(model, x, None, **settings)
                ours = seconds(model, x, laplace_backend(), **settings)
                row = f"{name:8}{subset:12}{structure:10}{theirs:9.3f}{ours:9.3f}"
                print(f"{row}{theirs / ours:7.1f}", flush=True)


if __name__ == "__main__":
    main()
