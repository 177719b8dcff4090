"""The memory budget: how many bytes a pass may use for intermediate values."""

from __future__ import annotations

from numbers import Real

from backpack_core.errors import UsageError

_budget = 64 * 2**20


def memory_budget() -> int:
    """The number of bytes that an intermediate value may take. Default: 64 MiB."""
    return _budget


def set_memory_budget(size: int) -> None:
    """Set how many bytes an intermediate value may take. Results agree up to rounding.

    For a quantity with a sample axis, columns may take as much memory as the result.

    Args:
        size: Number of bytes. Smaller saves memory, down to one product per sample and column.

    Raises:
        UsageError: It is not a positive number.
    """
    global _budget
    given: object = size
    if isinstance(given, bool) or not isinstance(given, Real) or not size > 0:
        raise UsageError(f"The memory budget is a positive number of bytes. Got {size!r}.")
    _budget = size
