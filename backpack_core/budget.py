"""How much memory an intermediate product may take. Imports ``errors`` only."""

from __future__ import annotations

from backpack_core.errors import UsageError

_budget = 64 * 2**20


def memory_budget() -> int:
    """Bytes that an intermediate product of an operation may take. Default: 64 MiB."""
    return _budget


def set_memory_budget(size: int) -> None:
    """Set how many bytes an intermediate product may take; results agree to rounding.

    For a quantity with an axis for samples, columns may take as much as the result.

    Args:
        size: Number of bytes. Smaller saves memory, down to one product per sample and column.

    Raises:
        UsageError: It is not positive.
    """
    global _budget
    if size <= 0:
        raise UsageError(f"The memory budget is a positive number of bytes. Got {size}.")
    _budget = size


def even_size(count: int, most: int) -> int:
    """The size of parts that are about equal and no larger than ``most``."""
    return -(-count // -(-count // most))
