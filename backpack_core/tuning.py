"""Every machine constant that was found by measuring, and the memory budget.

Results depend on them by rounding only. ``docs/design/contractions.md`` says how they were found.
Imports ``errors`` only.
"""

from __future__ import annotations

from numbers import Real
from typing import Final

from backpack_core.errors import UsageError

# Bytes of a piece of products. It is written and then read, and should stay in the cache.
CACHE: Final = 4 * 2**20
# The same for a kernel that allocates each piece anew: larger ones take page faults.
DIRECT: Final = 5 * 2**19
# The same for pieces that several first-order extensions read: as fast, with a lower peak.
SHARED: Final = 2 * 2**20
# The same for one column whose factors are plain tensors: half of an L2 cache of 2 MiB.
PIECE: Final = 2**20
# From so many entries of a product on, squares are added one product at a time.
LARGE: Final = 2**14
# What one reading of a number from the cache costs, in multiply-adds.
READ: Final = 12
# What writing a number to memory costs that earlier passes have used, in multiply-adds.
WRITE: Final = 16
# From so many positions on, adding up formed products is cheaper than a product for the sum.
SUMMED: Final = 8
# From so many rows on, half of a symmetric product is formed, in bands, and mirrored.
SYMMETRIC: Final = 384
# Bytes of columns that travel at once on a CPU, at the widest layer. The allocator maps tensors of
# more than 32 MiB anew for every operation, and some operations need a little more than a tensor.
HEAP: Final = 26 * 2**20

_budget = 64 * 2**20


def memory_budget() -> int:
    """The number of bytes that an intermediate product may take. Default: 64 MiB."""
    return _budget


def set_memory_budget(size: int) -> None:
    """Set how many bytes an intermediate product may take; results agree to rounding.

    For a quantity with an axis for samples, columns may take as much as the result.

    Args:
        size: Number of bytes. Smaller saves memory, down to one product per sample and column.

    Raises:
        UsageError: It is no number, or not positive.
    """
    global _budget
    given: object = size
    if isinstance(given, bool) or not isinstance(given, Real) or not size > 0:
        raise UsageError(f"The memory budget is a positive number of bytes. Got {size!r}.")
    _budget = size


def column_budget(device: str) -> int:
    """The number of bytes that columns at one tensor may take on a type of device."""
    return min(HEAP, _budget) if device == "cpu" else _budget


def even_size(count: int, most: int) -> int:
    """The size of parts that are about equal, and no larger than ``most``."""
    return max(1, -(-count // max(1, -(-count // most))))
