"""The comparison that all checks use, and the error of a failed check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.contract.rules import LayerRule
from backpack_core.errors import OverwrittenInputError, UnsupportedError
from backpack_core.record.nested import iter_tensors

# Errors are relative to at least this, for a quantity that is zero.
SMALLEST_SCALE = 1e-4
# Comparisons in double precision allow at most this; those of lower precision allow more.
EXACT = 1e-6

# What a check yields to be compared: a name, the value found (``None`` for zero), the expected one.
Entries = Iterator[tuple[str, Tensor | None, Tensor]]


class CheckFailure(AssertionError):
    """A check found a fault; the message says what was expected and what was found."""


# The comparison in double precision with the largest share of its tolerance, for certificates.
closest: dict[str, Any] = {}


def require(condition: bool, message: str) -> None:
    """Raise :class:`CheckFailure` unless the condition holds."""
    if not condition:
        raise CheckFailure(message)


def refuses(
    error: type[Exception], message: str, function: Callable[..., object], *arguments: object
) -> None:
    """Require that a function raises an error for some arguments."""
    try:
        function(*arguments)
    except error:
        return
    raise CheckFailure(message)


def relative_error(found: Tensor, expected: Tensor, floor: float = SMALLEST_SCALE) -> float:
    """The largest deviation, relative to the largest expected entry (to ``floor`` at least)."""
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), floor) or 1.0
    return float((found - expected).abs().max()) / scale


def finite(value: Any, what: str) -> None:
    """Require that all tensors in a nested structure are finite."""
    good = all(bool(torch.isfinite(tensor).all()) for tensor in iter_tensors(value))
    require(good, f"{what}: not all values are finite.")


def close(
    found: Tensor, expected: Tensor, what: str, tolerance: float, floor: float = SMALLEST_SCALE
) -> None:
    """Require equal shapes, finite values, and a small relative error.

    Args:
        found: The computed value; both are compared in the wider of their dtypes.
        expected: The value of the oracle.
        what: Name of the quantity, for the message.
        tolerance: The relative error that is allowed.
        floor: Errors are relative to the largest expected entry, but at least to this.

    Raises:
        CheckFailure: They differ.
    """
    shapes = list(found.shape), list(expected.shape)
    require(shapes[0] == shapes[1], f"{what}: expected shape {shapes[1]}, found {shapes[0]}.")
    dtype = torch.promote_types(found.dtype, expected.dtype)
    found, expected = found.detach().to(dtype), expected.detach().to(dtype)
    finite(found, what)
    error = relative_error(found, expected, floor)
    share = closest["error"] / closest["allowed"] if closest else -1.0
    if 0 < tolerance <= EXACT and error / tolerance > share:
        closest.update(what=what, error=error, allowed=tolerance)
    if not error <= tolerance:  # also for nan. Finding a hint costs more than the comparison
        worst = int((found - expected).abs().argmax())
        at = [int(i) for i in torch.unravel_index(torch.tensor(worst), found.shape)]
        pair = (float(tensor.flatten()[worst]) for tensor in (expected, found))
        raise CheckFailure(
            "{}: expected {:.6g}, found {:.6g}".format(what, *pair)
            + f" at {at}; relative error {error:.1e}, allowed {tolerance:.0e}."
            + _hint(found, expected)
        )


def agree(entries: Entries | None, allowed: float, where: str = "") -> None:
    """Compare everything that a check yields.

    Args:
        entries: What the check yields.
        allowed: The relative error that is allowed.
        where: What is special about the situation, for the end of messages.
    """
    try:
        for what, found, expected in entries or ():
            if found is None:
                require(not bool(expected.any()), f"{what}: None, though the output depends on it.")
                continue
            require(found.dtype == expected.dtype, f"{what}: {found.dtype}, not {expected.dtype}.")
            close(found, expected, what, allowed)
    except Exception as error:
        if not where or isinstance(error, (UnsupportedError, OverwrittenInputError)):
            raise
        kind = "" if isinstance(error, CheckFailure) else f"{type(error).__name__}: "
        raise CheckFailure(f"{kind}{error} {where}") from error


def _hint(found: Tensor, expected: Tensor) -> str:
    """The end of the message, if the values differ only by a factor, which may be a sign."""
    norm = float(expected.square().sum())
    factor = float((found * expected).sum()) / norm if norm else 0.0
    if factor and abs(factor - 1) > 1e-3 and relative_error(found / factor, expected) < 1e-6:
        wrong = "sign" if factor < 0 else "factor"
        return f" It is {factor:.6g} times the right value: a wrong {wrong}."
    return ""


def _states() -> Tensor:
    """The states of the host's generator, and of the default device's."""
    host, device = torch.get_rng_state(), torch.get_default_device()
    module = None if device.type == "cpu" else getattr(torch, device.type)
    return host if module is None else torch.cat([host, module.get_rng_state(device)])


@contextmanager
def untouched(rule: LayerRule, module: Module, *tensors: Tensor) -> Iterator[None]:
    """Require that a rule changes no tensor that it gets, keeps no state, and draws no numbers."""
    before, kept = dict(vars(rule)), set(vars(module))
    numbers, copies = _states(), [tensor.detach().clone() for tensor in tensors]
    yield
    require(dict(vars(rule)) == before, "The rule changed its own attributes: keep no state.")
    added = sorted(set(vars(module)) - kept)
    require(not added, f"The rule stored {added} on the module: view.once(key, compute) keeps it.")
    same = torch.equal(numbers, _states())
    require(same, "The rule drew random numbers: those of the user's next batch would be others.")
    for tensor, copy in zip(tensors, copies, strict=True):
        same = torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(copy))
        require(same, "A method wrote to a tensor that it was given.")
