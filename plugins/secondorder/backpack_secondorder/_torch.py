"""Every use of torch's private interface in this package. Imports torch only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def run_engine(
    outputs: Sequence[Tensor | GradientEdge],
    inputs: Sequence[Tensor | GradientEdge],
    vectors: Sequence[Tensor | None] | None,
    retain_graph: bool,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad(..., allow_unused=True)``, for vectors of the outputs' shapes.

    Torch's function checks these in Python, which takes a tenth of a product with a small net. A
    ``backpack(...)`` block around the caller does not see this pass.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    given = (None,) * len(outputs) if vectors is None else tuple(vectors)
    found: tuple[Tensor | None, ...] = engine.run_backward(
        tuple(outputs), given, retain_graph, False, tuple(inputs), True, accumulate_grad=False
    )
    return found
