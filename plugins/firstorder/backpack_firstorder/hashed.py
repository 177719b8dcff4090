"""Counter-based random numbers: entry ``i`` of a stream is a function of its key and ``i``.

They are hashes of integers (SplitMix64, Steele et al., 2014). Every device, rank, thread and
version of torch gets the same numbers. Each number can be computed without those before it.
"""

from __future__ import annotations

from hashlib import sha256
from math import pi

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def key_of(*what: object) -> int:
    """The key of a stream with a description, in 64 bits."""
    digest = sha256("\0".join(map(str, what)).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def signs(key: int, places: Tensor) -> Tensor:
    """Numbers that are 1 or -1, each with probability one half, in double precision."""
    return 1.0 - 2.0 * (bits(key, places) < 0).double()


def normal(key: int, places: Tensor) -> Tensor:
    """Standard normal numbers, by Box and Muller's method, in double precision."""
    random = bits(key, places)
    radius = (((random >> 32) & 0xFFFFFFFF).double() + 0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    return radius * (random & 0xFFFFFFFF).double().mul_(2 * pi * 2.0**-32).cos_()


def below(key: int, places: Tensor, most: int) -> Tensor:
    """Integers from 0 to ``most - 1``."""
    return ((bits(key, places) >> 16) & 0xFFFFFFFFFF) % most


def bits(key: int, places: Tensor) -> Tensor:
    """64 random bits at each place, as ``int64``."""
    mixed = places * _signed(_STEP) + _signed(key + _STEP)
    for shift, factor in _FACTORS:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, count: int) -> Tensor:
    """A logical shift to the right; torch's own shift repeats the sign bit."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def places_of(rows: Tensor, width: int) -> Tensor:
    """The indices of the entries of some rows of a matrix. Shape ``[*rows, width]``."""
    return rows.unsqueeze(-1) * width + torch.arange(width, device=rows.device)
