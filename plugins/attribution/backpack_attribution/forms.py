"""In which form gradients are stored, and inner products of all forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from backpack_core.errors import UsageError


@dataclass(frozen=True, eq=False)
class LowRank:
    """Matrices of samples as sums of ``c`` products, ``M[n] = Σ_c left[n, :, c] right[n, :, c]ᵀ``.

    Attributes:
        left: ``[N, O, c]``.
        right: ``[N, I, c]``.
        shape: ``[N, *θ]``, with ``θ`` of ``O`` rows and all other axes flattened.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, matrices: Tensor, rank: int) -> LowRank:
        """The best approximations of a rank in the Frobenius norm: truncated singular values."""
        flat = matrices.flatten(2)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        u, s, vt = torch.linalg.svd(wide, full_matrices=False)
        root = s[:, None, :rank].sqrt()
        return cls(u[:, :, :rank] * root, vt[:, :rank].mT * root, matrices.shape)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.left)

    def __getitem__(self, rows: slice | list[int]) -> LowRank:
        """Some samples."""
        left = self.left[rows]
        return LowRank(left, self.right[rows], torch.Size([len(left), *self.shape[1:]]))

    def to(self, *args: Any, **kwargs: Any) -> LowRank:
        """On another device or in another precision; arguments as of :meth:`torch.Tensor.to`."""
        left, right = self.left.to(*args, **kwargs), self.right.to(*args, **kwargs)
        return LowRank(left, right, self.shape)

    def dense(self) -> Tensor:
        """The matrices, ``[N, *θ]``."""
        return (self.left @ self.right.mT).reshape(self.shape)


Value: TypeAlias = Tensor | LowRank
Gradients: TypeAlias = Mapping[str, Value]


def stored(value: Value, dtype: torch.dtype, rank: int | None) -> Value:
    """In the form and the precision of a store, on the CPU, without graph."""
    if isinstance(value, LowRank):
        return value.to("cpu", dtype)
    value = value.detach()
    if rank is not None and _takes_less_room(value.shape, rank):
        return LowRank.of(value, rank).to("cpu", dtype)
    return value.to("cpu", dtype)


def _takes_less_room(shape: torch.Size, rank: int) -> bool:
    if len(shape) < 3:
        return False
    rows, columns = shape[1], prod(shape[2:])
    return rank * (rows + columns) < rows * columns


def tensors(value: Value) -> dict[str, Tensor]:
    """What a file holds of a value, by name."""
    if isinstance(value, LowRank):
        return {"left": value.left, "right": value.right}
    return {"dense": value}


def from_tensors(found: Mapping[str, Tensor], shape: Sequence[int]) -> Value:
    """The value that :func:`tensors` took apart.

    Args:
        found: The tensors.
        shape: Of one sample, ``[*θ]``.
    """
    if "dense" in found:
        return found["dense"]
    left = found["left"]
    return LowRank(left, found["right"], torch.Size([len(left), *shape]))


def is_finite(value: Value) -> bool:
    """Whether all numbers are."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors(value).values())


def nbytes(value: Value) -> int:
    """Size in memory."""
    return sum(tensor.nbytes for tensor in tensors(value).values())


def cat(values: Sequence[Value]) -> Value:
    """Samples of several values, one behind the other."""
    if isinstance(values[0], LowRank):
        parts = cast(Sequence[LowRank], values)
        shape = torch.Size([sum(map(len, parts)), *parts[0].shape[1:]])
        left, right = (torch.cat([getattr(p, side) for p in parts]) for side in ("left", "right"))
        return LowRank(left, right, shape)
    return torch.cat(cast(list[Tensor], [*values]))


def inner(samples: Gradients, queries: Gradients) -> Tensor:
    """Inner products summed over the queries' parts, ``[N, M]``; in single precision at least.

    Args:
        samples: ``[N, *θ]`` for each part.
        queries: ``[M, *θ]`` for each part, or for some.
    """
    total: Tensor | None = None
    for name, query in queries.items():
        part = inner_of(samples[name], query)
        total = part if total is None else total + part
    if total is None:
        raise UsageError("There are no queries.")
    return total


def cosines(samples: Gradients, queries: Gradients) -> Tensor:
    """Inner products divided by both norms, over the queries' parts, ``[N, M]``; zero for zero."""
    rows = {name: samples[name] for name in queries}
    products = _over(inner(rows, queries), norm(rows))
    return _over(products.T, norm(queries)).T


def norm(gradients: Gradients) -> Tensor:
    """``‖g_n‖`` over all parts, ``[N]``, in single precision at least."""
    return sum(map(squared_norm, gradients.values()), torch.zeros(())).sqrt()


def _over(rows: Tensor, norms: Tensor) -> Tensor:
    return rows * torch.where(norms > 0, 1 / norms, 0).to(rows.dtype).unsqueeze(1)


def inner_of(value: Value, query: Value) -> Tensor:
    """Inner products of one part, ``[N, M]``."""
    value, query = _at_least_single(value), _at_least_single(query)
    if isinstance(value, LowRank) and isinstance(query, LowRank):
        left = torch.einsum("noc,mod->nmcd", value.left, query.left)
        return (left * torch.einsum("nic,mid->nmcd", value.right, query.right)).sum((2, 3))
    if isinstance(value, LowRank):
        matrices = cast(Tensor, query).flatten(2)
        half = torch.einsum("moi,nic->nmoc", matrices, value.right)
        return torch.einsum("nmoc,noc->nm", half, value.left)
    if isinstance(query, LowRank):
        return inner_of(query, value).T
    return value.flatten(1) @ query.flatten(1).to(value.dtype).T


def _at_least_single(value: Value) -> Value:
    dtype = value.left.dtype if isinstance(value, LowRank) else value.dtype
    return value.to(torch.promote_types(dtype, torch.float32))


def squared_norm(value: Value) -> Tensor:
    """``‖M[n]‖²``, ``[N]``, in single precision at least."""
    value = _at_least_single(value)
    if isinstance(value, LowRank):
        grams = (value.left.mT @ value.left) * (value.right.mT @ value.right)
        return grams.sum((1, 2))
    return value.flatten(1).square().sum(1)


def dense(value: Value) -> Tensor:
    """``[N, *θ]``."""
    return value.dense() if isinstance(value, LowRank) else value


def scaled_tensor(value: Tensor, factors: Tensor) -> Tensor:
    """Rows of a tensor multiplied with a number each."""
    return value * factors.to(value.dtype).reshape(-1, *[1] * (value.dim() - 1))


def rows(value: Value, chosen: list[int]) -> Value:
    """Some samples; the value itself where all are chosen."""
    return value if len(chosen) == len(value) else value[chosen]
