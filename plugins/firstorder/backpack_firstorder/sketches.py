"""The random linear maps ``[R, C] → [dim]`` of projections, applied to factors if possible.

A parameter is a matrix: its first axis has the rows, all others the columns. Every map keeps inner
products in expectation, ``E⟨Pg, Pg'⟩ = ⟨g, g'⟩``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import isqrt, log2, sqrt

import torch
from torch import Tensor

from backpack_firstorder.hashed import below, key_of, normal, places_of, signs
from backpack_firstorder.pairs import tables
from backpack_products.contractions import row_steps
from backpack_products.lookup import LookupProduct
from backpack_products.rows import Rows
from backpack_products.tuning import CACHE, memory_budget

# Part of the key of all random numbers; it changes when the method changes.
VERSION = 1


class Sketch(ABC):
    """A random linear map of one parameter's gradients.

    Attributes:
        shape: ``(R, C)``.
        dim: The length of the result.
    """

    def __init__(self, kind: str, name: str, seed: int, shape: tuple[int, int], dim: int) -> None:
        self.shape, self.dim = shape, dim
        self._name = (VERSION, kind, name, seed, *shape, dim)

    def key(self, role: str) -> int:
        """The key of the random numbers for a role."""
        return key_of(*self._name, role)

    @abstractmethod
    def formed(self, values: Tensor, rows: Tensor) -> Tensor:
        """The projection of some rows, which adds to that of all.

        Args:
            values: Shape ``[N, r, C]``.
            rows: The numbers of these rows, ``[r]``.
        """

    def most_rows(self) -> int:
        """How many rows to take at a time, so that random numbers stay within the cache."""
        return self.shape[0]

    def is_cheaper_by_factors(self, positions: int, groups: int) -> bool:
        """Whether :meth:`affine` takes fewer multiply-adds than gradients that are formed."""
        return False

    def affine(self, out: Tensor, inp: Rows) -> Tensor:
        """Projects ``Σ_s out[n, s] ⊗ inp[n, s]``, ``[N, S, G, O]`` and ``[N, S, G, I]``."""
        raise NotImplementedError

    def lookup(self, product: LookupProduct) -> Tensor:
        """Projects a table; default: the rows that are looked up, formed."""
        parts = [product.new_zeros(0, self.dim)]
        for rows, table in tables(product):
            total = table.new_zeros(len(table), self.dim)
            for some in torch.arange(len(rows), device=rows.device).split(self.most_rows()):
                total += self.formed(table[:, some], rows[some])
            parts.append(total)
        return torch.cat(parts)

    def _by_samples(
        self, out: Tensor, inp: Rows, function: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        parts = [out.new_zeros(0, self.dim)]
        parts += [function(out[r], inp[r]) for r in row_steps(inp, out.element_size())]
        return torch.cat(parts)


class Kronecker(Sketch):
    """``P_R ⊗ P_C`` of signs (as LoGra's initial matrices, Choe et al., 2024, arXiv:2405.13954).

    A vector that fits keeps its entries, each with a random sign, which makes inner products exact.
    """

    def __init__(self, kind: str, name: str, seed: int, shape: tuple[int, int], dim: int) -> None:
        super().__init__(kind, name, seed, shape, dim)
        self._fits = shape[1] == 1 and shape[0] <= dim
        self.sizes = (dim, 1) if self._fits else even_factors(dim, shape)

    def _rows(self, rows: Tensor, like: Tensor) -> Tensor:
        if self._fits:
            sign = signs(self.key("entries"), rows).to(like.dtype).unsqueeze(-1)
            return like.new_zeros(*rows.shape, self.dim).scatter_(-1, rows.unsqueeze(-1), sign)
        places = places_of(rows, self.sizes[0])
        return signs(self.key("rows"), places).div_(sqrt(self.sizes[0])).to(like.dtype)

    def _columns(self, like: Tensor) -> Tensor:
        places = places_of(torch.arange(self.shape[1], device=like.device), self.sizes[1])
        return signs(self.key("columns"), places).div_(sqrt(self.sizes[1])).to(like.dtype)

    def formed(self, values: Tensor, rows: Tensor) -> Tensor:
        """``P_Rᵀ M P_C``."""
        right = values @ self._columns(values)
        return (self._rows(rows, values).mT @ right).flatten(1)

    def is_cheaper_by_factors(self, positions: int, groups: int) -> bool:
        """By the count for one sample."""
        (rows, columns), (left, right) = self.shape, self.sizes
        by_factors = positions * (rows * left + groups * (columns * right + left * right))
        formed = (positions + right) * rows * columns + rows * left * right
        return by_factors <= formed

    def affine(self, out: Tensor, inp: Rows) -> Tensor:
        """Both factors are projected before they meet."""
        left = self._rows(torch.arange(self.shape[0], device=out.device), out)
        left, right = left.reshape(*out.shape[2:], -1), self._columns(out)

        def project(out: Tensor, inp: Tensor) -> Tensor:
            if len(left) == 1:
                met = out[:, :, 0] @ left[0]
            else:
                met = torch.einsum("nsgo,gok->nsgk", out, left).flatten(1, 2)
            return (met.mT @ (inp.flatten(1, 2) @ right)).flatten(1)

        return self._by_samples(out, inp, project)

    def lookup(self, product: LookupProduct) -> Tensor:
        """Signs of rows are computed by number; if most are used, as a table of all."""
        out, row = product.out[0], product.row
        if row.numel() < self.shape[0]:
            left = self._rows(row, out)
        else:
            left = self._rows(torch.arange(self.shape[0], device=out.device), out)[row]
        return (left.mT @ (out @ self._columns(out))).flatten(1)


class Matrix(Sketch):
    """A matrix of independent random numbers, computed in parts whenever it is needed."""

    @staticmethod
    @abstractmethod
    def draw(key: int, places: Tensor) -> Tensor:
        """Random numbers with variance one, by their places."""

    def most_rows(self) -> int:
        """As many rows as fill a cache with random numbers."""
        return max(1, CACHE // 8 // (self.shape[1] * self.dim))

    def formed(self, values: Tensor, rows: Tensor) -> Tensor:
        """A product with the part of the matrix for these rows, in parts."""
        key, width = self.key("matrix"), self.shape[1]
        total = values.new_zeros(len(values), self.dim)
        for some in torch.arange(len(rows), device=rows.device).split(self.most_rows()):
            entries = places_of(rows[some], width).flatten()
            matrix = self.draw(key, places_of(entries, self.dim)).div_(sqrt(self.dim))
            total += values[:, some].flatten(1) @ matrix.to(values.dtype)
        return total


class Gaussian(Matrix):
    """Normal numbers with variance ``1/dim``."""

    draw = staticmethod(normal)


class Rademacher(Matrix):
    """``±1/√dim`` (Achlioptas, 2003)."""

    draw = staticmethod(signs)


class Sparse(Sketch):
    """Each entry goes to one place with a sign (count sketch, Charikar et al., 2002).

    Place and sign of entry ``(i, j)`` are ``h(i) + h'(j) mod dim`` and ``s(i) s'(j)``. So the
    sketch of an outer product is a circular convolution of those of its factors (Pham and Pagh,
    2013).
    """

    def _hashed(self, role: str, numbers: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        sign = signs(self.key(f"signs of {role}"), numbers).to(like.dtype)
        return below(self.key(f"places of {role}"), numbers, self.dim), sign

    def _columns(self, like: Tensor) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(self.shape[1], device=like.device)
        return self._hashed("columns", numbers, like)

    def most_rows(self) -> int:
        """As many rows as fill a cache with places."""
        return max(1, CACHE // (8 * self.shape[1]))

    def formed(self, values: Tensor, rows: Tensor) -> Tensor:
        """Entries are added up where they go."""
        (place, sign), (column, other) = self._hashed("rows", rows, values), self._columns(values)
        where = (place.unsqueeze(1) + column).flatten() % self.dim
        total = values.new_zeros(len(values), self.dim)
        signed = values * sign.unsqueeze(1) * other
        return total.index_add_(1, where, signed.flatten(1))

    def is_cheaper_by_factors(self, positions: int, groups: int) -> bool:
        """By the count for one sample; a transform takes about ``5/2 dim log₂ dim``."""
        rows, columns = self.shape
        single = 5 * self.dim * (1 + log2(self.dim))
        by_factors = positions * groups * single + positions * (rows + groups * columns)
        return by_factors <= positions * rows * columns + 4 * rows * columns

    def affine(self, out: Tensor, inp: Rows) -> Tensor:
        """Sketches of both factors are multiplied as Fourier series."""
        numbers = torch.arange(self.shape[0], device=out.device)
        (place, sign), (column, other) = self._hashed("rows", numbers, out), self._columns(out)
        place, sign = place.view(out.shape[2:]), sign.view(out.shape[2:])

        def series(factor: Tensor, where: Tensor) -> Tensor:
            total = factor.new_zeros(*factor.shape[:-1], self.dim)
            found: Tensor = torch.fft.rfft(
                total.scatter_add_(-1, where.expand(factor.shape), factor)
            )
            return found

        def project(out: Tensor, inp: Tensor) -> Tensor:
            single = max(1, out[:1, :, :, 0].numel() * self.dim * 4 * out.element_size())
            few = max(1, memory_budget() // single)
            found = [
                (series(left * sign, place) * series(right * other, column)).sum((1, 2))
                for left, right in zip(out.split(few), inp.split(few), strict=True)
            ]
            whole: Tensor = torch.fft.irfft(torch.cat(found), n=self.dim)
            return whole

        return self._by_samples(out, inp, project)

    def lookup(self, product: LookupProduct) -> Tensor:
        """Entries of the rows that are looked up."""
        out, row = product.out[0], product.row
        (place, sign), (column, other) = self._hashed("rows", row, out), self._columns(out)
        where = (place.unsqueeze(-1) + column).flatten(1) % self.dim
        signed = out * sign.unsqueeze(-1) * other
        return out.new_zeros(len(out), self.dim).scatter_add_(1, where, signed.flatten(1))


def even_factors(dim: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Two nearly equal factors of a number, at most rows and columns if possible."""
    rows, columns = (max(1, size) for size in shape)
    divisors = [d for d in range(1, isqrt(dim) + 1) if dim % d == 0]
    pairs = [pair for d in divisors for pair in ((d, dim // d), (dim // d, d))]

    def badness(pair: tuple[int, int]) -> tuple[float, float, int]:
        left, right = pair
        excess = max(1.0, left / rows) * max(1.0, right / columns)
        return excess, abs(log2(left / right)), left

    return min(pairs, key=badness)
