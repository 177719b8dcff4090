"""The comparison that all checks use, and the error of a failed check. Imports torch only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.rules import LayerRule

# Errors are relative to at least this, for a quantity that is zero.
SMALLEST_SCALE = 1e-4


class CheckFailure(AssertionError):
    """A check found a fault; the message says what was expected and what was found."""


def require(condition: bool, message: str) -> None:
    """Fail the check unless the condition holds.

    Raises:
        CheckFailure: The condition does not hold.
    """
    if not condition:
        raise CheckFailure(message)


def relative_error(found: Tensor, expected: Tensor, floor: float = SMALLEST_SCALE) -> float:
    """Largest deviation in units of the largest expected entry, or of the floor if that is more."""
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), floor) or 1.0
    return float((found - expected).abs().max()) / scale


def close(
    found: Tensor, expected: Tensor, what: str, tolerance: float, floor: float = SMALLEST_SCALE
) -> None:
    """Require equal shapes, finite values, and a small relative error.

    Args:
        found: What was computed; the two are compared in the wider of their dtypes.
        expected: The value of the oracle.
        what: Name of the quantity, for the message.
        tolerance: Relative error that is allowed.
        floor: Errors are relative to the largest expected entry, but not to less than this.

    Raises:
        CheckFailure: They differ.
    """
    require(
        found.shape == expected.shape,
        f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}.",
    )
    dtype = torch.promote_types(found.dtype, expected.dtype)
    found, expected = found.detach().to(dtype), expected.detach().to(dtype)
    require(bool(torch.isfinite(found).all()), f"{what}: not all values are finite.")
    error = relative_error(found, expected, floor)
    if not error <= tolerance:  # a hint costs more than the comparison
        hint = _hint(found, expected)
        raise CheckFailure(f"{what}: relative error {error:.1e}, allowed {tolerance:.0e}.{hint}")


def _hint(found: Tensor, expected: Tensor) -> str:
    """A hint for the message, if the values differ by a sign or a factor only."""
    if relative_error(-found, expected) < 1e-6:
        return " It is minus the right value: a wrong sign."
    norm = float(expected.square().sum())
    if norm:
        factor = float((found * expected).sum()) / norm
        if factor and abs(factor - 1) > 1e-3 and relative_error(found / factor, expected) < 1e-6:
            return f" It is {factor:.6g} times the right value: a wrong factor."
    return ""


@contextmanager
def stateless(rule: LayerRule, module: Module) -> Iterator[None]:
    """Require that a rule keeps nothing, on itself or on the module, and draws no numbers."""
    before, kept = dict(vars(rule)), set(vars(module))
    numbers = torch.get_rng_state()
    yield
    require(dict(vars(rule)) == before, "The rule changed its own attributes: keep no state.")
    added = sorted(set(vars(module)) - kept)
    require(not added, f"The rule stored {added} on the module: view.once(key, compute) keeps it.")
    same = torch.equal(numbers, torch.get_rng_state())
    require(same, "The rule drew random numbers: those of the user's next batch would be others.")
