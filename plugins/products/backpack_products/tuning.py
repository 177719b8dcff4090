"""Every machine constant that was found by measuring.

Results depend on them by rounding only. ``docs/design/products.md`` says how they were found.
"""

from __future__ import annotations

from typing import Final

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


def even_size(count: int, most: int) -> int:
    """The size of parts that are about equal, and no larger than ``most``."""
    return max(1, -(-count // max(1, -(-count // most))))
