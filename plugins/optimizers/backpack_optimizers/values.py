"""Matrices that are kept: whether they are finite, and what they are after a state is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_optimizers.passes import Factors
from backpack_secondorder.kronecker import matrix_from_state
from backpack_secondorder.matrix import CurvatureMatrix


def require_finite(found: Mapping[str, Factors], name_of: Callable[[Tensor], str]) -> None:
    """Raise where a matrix is not finite, before it is part of an average.

    Raises:
        UsageError: One is not.
    """
    pairs = [(p, t) for table in found.values() for p, m in table.items() for t in _numbers(m)]
    if pairs and not bool(torch.stack([t.isfinite().all() for _, t in pairs]).all()):
        bad = next(p for p, t in pairs if not bool(t.isfinite().all()))
        raise UsageError(
            f"The curvature of the parameter {name_of(bad)!r} is not finite: the loss or a number "
            "in the net is inf or nan. Nothing has changed; leave this batch out by "
            "optimizer.zero_grad(), or lower the learning rate."
        )


def _numbers(matrix: CurvatureMatrix) -> list[Tensor]:
    return [*matrix.tensors().values()]


def numbers_of(matrix: CurvatureMatrix) -> dict[str, Tensor]:
    """Its state without the fingerprint: the optimizer keeps one for all."""
    return {name: tensor for name, tensor in matrix.state_dict().items() if name != "plugins"}


def restored(state: Mapping[str, Tensor], parameter: Tensor, name: str) -> CurvatureMatrix:
    """A matrix from its state, where its parameter is.

    Raises:
        UsageError: It belongs to a parameter of another shape.
    """
    matrix = matrix_from_state(state).to(parameter.device)
    if matrix.order.shape != parameter.shape:
        raise UsageError(
            f"The state has curvature of a parameter of shape {list(matrix.order.shape)} in the "
            f"place of {name!r}, of shape {list(parameter.shape)}: it is that of another model."
        )
    return matrix
