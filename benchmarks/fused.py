"""Columns through fused attention together, and one by one as ``torch.vmap`` sends them.

Run ``python -m benchmarks.fused``: exact curvature of a small GPT, with as many columns as tokens
times the vocabulary. Each line has the CPU time and the number of torch's operations, both ways in
one run.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backpack_core import backpack, extend
from backpack_core.extensions import KFLR, DiagGGNExact
from backpack_operations import bridge
from benchmarks.transformers import GPT2

REPEATS = 5


class _Counting(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on."""
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _one_by_one() -> AbstractContextManager[Any]:
    return mock.patch.object(bridge, "fused_product", return_value=None)


def measure(function: Callable[[], None], around: Callable[[], Any]) -> tuple[float, int]:
    """Median milliseconds of CPU time, and the number of operations."""
    times = []
    with around():
        for _ in range(REPEATS + 2):  # two passes that are measured by the library come first
            start = time.process_time()
            function()
            times.append(1e3 * (time.process_time() - start))
        with _Counting() as counting:
            function()
    return statistics.median(times[2:]), counting.count.total()


class Language(GPT2):
    """Logits of the next token at each, ``[N, classes, L]``."""

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens ``[N, L]``."""
        places = torch.arange(x.shape[1]).expand(x.shape)
        hidden = self.blocks(self.tokens(x) + self.positions(places))
        result: Tensor = self.head(self.norm(hidden)).transpose(1, 2)
        return result


def main() -> None:
    """Print a line for each quantity."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = extend(Language(32, vocabulary=64, classes=64))
    lossfunc, tokens = extend(nn.CrossEntropyLoss()), torch.randint(64, (2, 17))
    for extension in (DiagGGNExact, KFLR):

        def run(kind: Any = extension) -> None:
            loss = lossfunc(model(tokens[:, :-1]), tokens[:, 1:])
            with backpack(kind()):
                loss.backward()

        (before, many), (after, few) = (measure(run, c) for c in (_one_by_one, nullcontext))
        print(
            f"{extension.__name__:13} one by one {before:7.1f} ms {many:6} operations   "
            f"together {after:7.1f} ms {few:6} operations   {before / after:5.2f} times"
        )


if __name__ == "__main__":
    main()
