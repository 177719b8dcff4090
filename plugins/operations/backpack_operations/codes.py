"""Numbers without a pattern, for equations that should hold by no chance.

They are computed: a generator would be a hidden input of a step, so no recording could contain it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_ODD: Final = 0x1E3779B97F4A7C15  # with as many ones as zeros


def codes(count: int, first: int = 0) -> Tensor:
    """Different integers of all sizes, ``[count]``, on the host; others for another first one."""
    return mixed(mixed(torch.arange(first + 1, first + 1 + count, device="cpu")) + 1)


def mixed(numbers: Tensor) -> Tensor:
    """Different integers for different ones; each bit depends on many."""
    # The last bits of round floats are zeros, so the first ones are mixed with them.
    numbers = (numbers ^ (numbers >> 32 & 2**32 - 1)) * _ODD
    return numbers ^ (numbers >> 29 & 2**35 - 1)
