"""Sources of random numbers: OpenSSL's, which the operating system seeds, or a seed for tests."""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor

from backpack_core.errors import UsageError

# Each Gaussian number is the sum of this many, divided by the root of the number.
SUMMED = 4
_BITS = 53  # of a uniform number in double precision
_MOST_BYTES = 2**30  # of one call
_AT_ONCE = 2**16  # numbers, so that what they are made of stays in the cache


class Source(ABC):
    """Uniform and Gaussian random numbers."""

    @abstractmethod
    def uniform(self, count: int) -> Tensor:
        """Numbers in ``[0, 1)``, shape ``[count]``, in double precision on the host."""

    @abstractmethod
    def normal(self, like: Tensor) -> Tensor:
        """Independent standard normal numbers with the shape, dtype and device of a tensor."""

    def normals(self, likes: Sequence[Tensor]) -> Iterable[Tensor]:
        """The same for each of several tensors, one after the other."""
        return map(self.normal, likes)

    def state_dict(self) -> dict[str, Any]:
        """The state needed to continue after a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Continue from a state."""


class System(Source):
    """Numbers from OpenSSL's cryptographic generator, which the operating system seeds.

    Its numbers do not show its other numbers. The privacy guarantee supposes this, and a generator
    for simulations does not offer it. ``os.urandom`` offers it at a tenth of the speed. OpenSSL
    seeds its generator again in a process that was forked. A Gaussian number is made in double
    precision from several draws, ``Σ_i z_i / √n`` with ``n`` = 4, so that the pattern of possible
    floating-point numbers does not show the value without noise (Holohan and Braghin, 2021,
    arXiv:2107.10138).
    """

    def uniform(self, count: int) -> Tensor:
        """See the class."""
        if not count:
            return torch.empty(0, dtype=torch.float64)
        drawn = bytearray()
        while missing := 8 * count - len(drawn):
            drawn += ssl.RAND_bytes(min(missing, _MOST_BYTES))
        bits = torch.frombuffer(drawn, dtype=torch.int64)
        return bits.bitwise_and_(2**_BITS - 1).double().mul_(2.0**-_BITS)

    def normal(self, like: Tensor) -> Tensor:
        """See the class."""
        (found,) = self.normals([like])
        return found

    def normals(self, likes: Sequence[Tensor]) -> Iterator[Tensor]:
        """See the class. Small tensors have shares of one draw."""
        left = sum(like.numel() for like in likes)
        drawn = torch.empty(0, device="cpu")
        for like in likes:
            missing = found = torch.empty(like.numel(), dtype=like.dtype, device="cpu")
            while len(missing):
                if not len(drawn):
                    drawn = self._normal(min(left, _AT_ONCE))
                    left -= len(drawn)
                count = min(len(missing), len(drawn))
                missing[:count].copy_(drawn[:count])
                missing, drawn = missing[count:], drawn[count:]
            yield found.view(like.shape).to(like.device)

    def _normal(self, count: int) -> Tensor:
        """By the transformation of Box and Muller, whose two numbers of each pair are added."""
        pairs = count * SUMMED // 2
        radius = self.uniform(pairs).neg_().log1p_().mul_(-2).sqrt_()
        angle = self.uniform(pairs).mul_(2 * pi)
        both = angle.cos().add_(angle.sin_()).mul_(radius)
        return both.view(SUMMED // 2, count).sum(0).div_(sqrt(SUMMED))


class Seeded(Source):
    """Numbers from torch's generators: the same for the same seed. For tests, not for privacy."""

    def __init__(self, seed: int) -> None:
        """Store the seed."""
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}

    def uniform(self, count: int) -> Tensor:
        """See the class."""
        return torch.rand(count, dtype=torch.float64, generator=self._of("cpu", "uniform"))

    def normal(self, like: Tensor) -> Tensor:
        """See the class."""
        generator = self._of(str(like.device), "normal")
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)

    def _of(self, device: str, use: str) -> torch.Generator:
        """Batches and noise have separate generators, so they do not depend on each other."""
        key = f"{device} {use}"
        if key not in self._generators:
            seed = self._seed if use == "normal" else self._seed + 2**32
            self._generators[key] = torch.Generator(device).manual_seed(seed)
        return self._generators[key]

    def state_dict(self) -> dict[str, Any]:
        """The states of the generators."""
        return {key: found.get_state() for key, found in self._generators.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the base class."""
        for key, known in state.items():
            self._of(*key.split(" ")).set_state(known)


def source(seed: int | None) -> Source:
    """A cryptographic source, or one with a seed.

    Raises:
        UsageError: The seed is not a whole number.
    """
    if seed is None:
        return System()
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError(
            "seed must be a whole number, for tests, or None for a cryptographic source of "
            f"random numbers, which privacy needs. Got {seed!r}."
        )
    return Seeded(seed)
