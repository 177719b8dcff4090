"""Every number that was measured on a machine, and the one way to change each.

Results do not depend on any of them, but for rounding. How they were found stands in
``docs/design/contractions.md``. Imports ``errors`` only.
"""

from __future__ import annotations

from typing import Final

from backpack_core.errors import UsageError

# Bytes of a piece of products: it is consumed at once, so it should stay in the cache between.
CACHE: Final = 4 * 2**20
# The same for a kernel that makes fresh memory for each piece, which takes page faults above.
DIRECT: Final = 5 * 2**19
# The same for pieces that several read of first order: as fast, and less at the peak of a pass.
SHARED: Final = 2 * 2**20
# The same for pieces of one column whose factors are there: half of an L2 cache of 2 MiB.
PIECE: Final = 2**20
# Entries of one product from which on adding its square by itself beats a reduction over several.
LARGE: Final = 2**14
# Multiply-adds that one reading of a number costs, which was written to the cache.
READ: Final = 12
# The same for one that is written to be kept, to memory that earlier passes used.
WRITE: Final = 16
# Positions from which on adding up what was formed costs less than a product for the sum.
SUMMED: Final = 8
# Rows of a symmetric product from which on half of it is formed, in bands, and mirrored.
SYMMETRIC: Final = 384
# Bytes of the widest columns that are carried at once on a CPU. A tensor of more than 32 MiB is
# fresh memory for every operation, which takes page faults; some need a little more than that.
HEAP: Final = 26 * 2**20

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
        UsageError: It is no number, or not positive.
    """
    global _budget
    if not isinstance(size, (int, float)) or size <= 0:
        raise UsageError(f"The memory budget is a positive number of bytes. Got {size!r}.")
    _budget = size


def column_budget(device: str) -> int:
    """Bytes that columns at one tensor may take, on a type of device."""
    return min(HEAP, _budget) if device == "cpu" else _budget


def even_size(count: int, most: int) -> int:
    """The size of parts that are about equal and no larger than ``most``."""
    return max(1, -(-count // max(1, -(-count // most))))
