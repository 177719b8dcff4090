"""Kept matrices: whether they are finite, and how they are saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_optimizers.passes import Factors
from backpack_products.fingerprint import Fingerprint, agreed
from backpack_secondorder.kronecker import matrix_from_state
from backpack_secondorder.matrix import CurvatureMatrix


def require_finite(found: Mapping[str, Factors], name_of: Callable[[Tensor], str]) -> None:
    """Check that matrices are finite, before they become part of an average.

    Raises:
        UsageError: A matrix is not finite.
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


def saved(
    tables: Mapping[str, Factors], parameters: Sequence[Tensor], plugins: Fingerprint
) -> dict[str, Any]:
    """Matrices in the form of a state.

    Args:
        tables: Matrices by name and parameter.
        parameters: All parameters of the optimizer; a state has their places.
        plugins: The plugins that computed the matrices. The state keeps one fingerprint for all.
    """
    places = {p: place for place, p in enumerate(parameters)}
    found: dict[str, Any] = {"plugins": plugins}
    for name, table in tables.items():
        found[name] = {places[p]: _without_plugins(matrix) for p, matrix in table.items()}
    return found


def _without_plugins(matrix: CurvatureMatrix) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in matrix.state_dict().items() if name != "plugins"}


def require_same_plugins(found: Mapping[str, Any], own: Fingerprint) -> None:
    """Refuse a state that other plugins computed; see :func:`agreed`."""
    results = {"The curvature of the state": found.get("plugins", {})}
    agreed({**results, "that of further steps": own}, is_one_quantity=False)


def restore(
    tables: Mapping[str, Factors],
    found: Mapping[str, Any],
    parameters: Sequence[Tensor],
    name_of: Callable[[Tensor], str],
) -> None:
    """Fill tables with the result of :func:`saved`."""
    for name, table in tables.items():
        table.clear()
        for place, state in found[name].items():
            parameter = parameters[place]
            table[parameter] = restored(state, parameter, name_of(parameter))


def restored(state: Mapping[str, Tensor], parameter: Tensor, name: str) -> CurvatureMatrix:
    """A matrix from its state, on the device of its parameter.

    Raises:
        UsageError: The matrix belongs to a parameter of another shape.
    """
    matrix = matrix_from_state(state).to(parameter.device)
    if matrix.order.shape != parameter.shape:
        raise UsageError(
            f"The state has curvature for a parameter of shape {list(matrix.order.shape)}, but "
            f"{name!r} has the shape {list(parameter.shape)}: load a state of the same model."
        )
    return matrix
