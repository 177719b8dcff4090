"""The memory budget of a pass, and all constants that were found by measuring on a machine.

They affect speed, and results only by rounding. ``docs/design/products.md`` has the reasons for
the largest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import Final

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
        UsageError: ``size`` is not a positive number.
    """
    global _budget
    given: object = size
    if isinstance(given, bool) or not isinstance(given, Real) or not size > 0:
        raise UsageError(f"The memory budget must be a positive number of bytes. Got {size!r}.")
    _budget = size


@contextmanager
def within_budget(size: int) -> Iterator[None]:
    """A block with another memory budget."""
    before = memory_budget()
    set_memory_budget(size)
    try:
        yield
    finally:
        set_memory_budget(before)


# Bytes of a piece of products, which is written and then read, and should fit into the cache.
CACHE: Final = 4 * 2**20
# The same for a kernel that allocates each piece: larger pieces cause page faults.
DIRECT: Final = 5 * 2**19
# For each output feature, from this many positions on, a kernel pays although products are copied.
COPIED: Final = 4
# The same for pieces that several first-order extensions read: as fast, with lower peak memory.
SHARED: Final = 2 * 2**20
# The same for one column whose factors are plain tensors: half of an L2 cache of 2 MiB.
PIECE: Final = 2**20
# From this many entries of a product on, squares are added one product at a time.
LARGE: Final = 2**14
# The cost of reading a number from the cache, in multiply-adds.
READ: Final = 12
# The cost of writing a number to memory that was used before, in multiply-adds.
WRITE: Final = 16
# From this many positions on, summing formed products is cheaper than a product for the sum.
SUMMED: Final = 8
# Up to this many entries of factors, padding costs less than a kernel for each number of rows.
PADDED: Final = 2**17
# From this many rows on, half of a symmetric product is computed, in bands, and mirrored.
SYMMETRIC: Final = 384
# The least number of positions in a band of a symmetric matrix of their inner products.
BAND: Final = 32
# From this many multiply-adds on, the faster of two libraries is chosen.
WHOLE: Final = 2**22
# The same for each product of a batch; the products are then computed one by one.
EACH: Final = 2**21
# How many times as fast a library must be to be chosen.
LARGER: Final = 1.4


# Bytes of columns that are propagated at once on a CPU, at the widest layer. The allocator maps
# tensors above 32 MiB anew for every operation, and some operations need a bit more than a tensor.
HEAP: Final = 26 * 2**20


_is_unsplit = ContextVar("is_unsplit", default=False)


@contextmanager
def unsplit() -> Iterator[None]:
    """A block in which products are split to fit into memory, but not into the cache.

    It is for compilation: many small pieces take long to compile, and a compiler chooses its own
    sizes.
    """
    before = _is_unsplit.set(True)
    try:
        yield
    finally:
        _is_unsplit.reset(before)


def is_unsplit() -> bool:
    """Whether a block of :func:`unsplit` is active."""
    return _is_unsplit.get()


def piece_size(cached: int) -> int:
    """The number of bytes that a piece of products may have.

    Args:
        cached: The number of bytes that fit into the cache.
    """
    return memory_budget() if is_unsplit() else min(cached, memory_budget())


def even_size(count: int, most: int) -> int:
    """The size of about equal parts of ``count``, of at most ``most``."""
    return max(1, -(-count // max(1, -(-count // most))))


def column_budget(device: str) -> int:
    """The number of bytes that columns at one tensor may take on a type of device."""
    return min(HEAP, memory_budget()) if device == "cpu" else memory_budget()
