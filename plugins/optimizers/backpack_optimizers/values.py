"""Kept matrices: whether they are finite, and how they are saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_optimizers.passes import Factors
from backpack_products.fingerprint import Fingerprint, agreed
from backpack_secondorder.kronecker import KroneckerFactors, matrix_from_state
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


def require_finite_gradients(
    parameters: Iterable[Tensor], name_of: Callable[[Tensor], str]
) -> None:
    """Check that gradients are finite, before parameters step by them and momenta keep them.

    Raises:
        UsageError: A gradient is not finite.
    """
    pairs = [(p, p.grad) for p in parameters if p.grad is not None]
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, grad in pairs:
        by_device.setdefault(grad.device, []).append(grad.isfinite().all())
    if not all(bool(torch.stack(found).all()) for found in by_device.values()):
        bad = next(p for p, grad in pairs if not bool(grad.isfinite().all()))
        raise UsageError(
            f"The gradient of the parameter {name_of(bad)!r} is not finite: the loss or a number "
            "in the net is inf or nan. Nothing has changed; leave this batch out by "
            "optimizer.zero_grad(), or lower the learning rate."
        )


def _numbers(matrix: CurvatureMatrix) -> list[Tensor]:
    return [*matrix.tensors().values()]


def decay_at(count: int, most: float) -> float:
    """The share of the past in an average of so many, at most ``most``."""
    return min(1 - 1 / count, most)


def fold(
    found: Factors, averages: dict[Tensor, KroneckerFactors], counts: dict[Tensor, int], most: float
) -> None:
    """Add Kronecker factors of new data to moving averages.

    Args:
        found: The new factors.
        averages: The averages so far.
        counts: How many factors are in each.
        most: See :func:`decay_at`.
    """
    for parameter, new in found.items():
        factors, known = cast(KroneckerFactors, new), averages.get(parameter)
        count = counts[parameter] = counts.get(parameter, 0) + 1
        averages[parameter] = (
            factors if known is None else known.moving_average(factors, decay_at(count, most))
        )


@contextmanager
def unchanged_on_error(tables: Iterable[dict[Any, Any]]) -> Iterator[None]:
    """A block that puts tables back if it raises, so that a step can be tried again."""
    kept = [(table, dict(table)) for table in tables]
    try:
        yield
    except BaseException:
        for table, before in kept:
            table.clear()
            table.update(before)
        raise


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


def all_restored(
    names: Iterable[str],
    found: Mapping[str, Any],
    parameters: Sequence[Tensor],
    name_of: Callable[[Tensor], str],
) -> dict[str, Factors]:
    """The matrices of a state that :func:`saved` made, by name and parameter.

    Raises:
        UsageError: They belong to another model.
    """
    places = {place for name in names for place in found[name]}
    if places and max(places) >= len(parameters):
        raise UsageError(
            f"The state has curvature for {max(places) + 1} parameters or more, but this optimizer "
            f"has {len(parameters)}: load a state of the same model, with the same groups."
        )
    return {
        name: {
            parameters[place]: restored(state, parameters[place], name_of(parameters[place]))
            for place, state in found[name].items()
        }
        for name in names
    }


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
