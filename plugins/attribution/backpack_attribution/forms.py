"""Gradients of samples by parameter, as tensors or as products, with operations on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from backpack_core.autocast import without_autocast
from backpack_core.errors import ShapeError, UsageError
from backpack_firstorder import SampleGradients
from backpack_products.tuning import memory_budget

Value: TypeAlias = Tensor | SampleGradients
Gradients: TypeAlias = Mapping[str, Value]


def stored(value: Value, dtype: torch.dtype, rank: int | None) -> Value:
    """A copy in the form and precision of a store, on the CPU, without a graph.

    Args:
        value: ``[N, *θ]``.
        dtype: The dtype of the store.
        rank: The rank of the store; ``None`` for whole matrices.
    """
    if rank is not None and _takes_less_room(value.shape, rank):
        given = SampleGradients.from_dense(value) if isinstance(value, Tensor) else value
        low = given.low_rank(rank)
        wide = low if low.nbytes < prod(value.shape) * low.dtype.itemsize else low.dense()
        moved = wide.to("cpu", dtype)
        return moved.clone() if moved is given else moved
    if isinstance(value, Tensor):
        return value.detach().to("cpu", dtype, copy=True)  # the caller may fill it again
    return value.dense().to("cpu", dtype)


def _takes_less_room(shape: torch.Size, rank: int) -> bool:
    if len(shape) < 3:
        return False
    rows, columns = shape[1], prod(shape[2:])
    return rank * (rows + columns) < rows * columns


def tensors(value: Value) -> dict[str, Tensor]:
    """The tensors of a value for a file, by name."""
    return {"rows": value} if isinstance(value, Tensor) else value.state_dict()


def from_tensors(found: Mapping[str, Tensor]) -> Value:
    """The value that :func:`tensors` took apart."""
    return found["rows"] if "rows" in found else SampleGradients.from_state_dict(found)


def is_finite(value: Value) -> bool:
    """Whether all numbers are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors(value).values())


def dense(value: Value) -> Tensor:
    """``[N, *θ]``."""
    return value if isinstance(value, Tensor) else value.dense()


def ready(queries: Gradients) -> Gradients:
    """Queries for products with many batches of samples: formed if that is cheaper.

    They take at most 16 times ``memory_budget()``.
    """
    found, room = dict(queries), 16 * memory_budget()
    for name, value in queries.items():
        if isinstance(value, SampleGradients):
            found[name] = formed = value.prepared(room)
            room -= 0 if formed is value else formed.nbytes
    return found


def cat(values: Sequence[Value]) -> Value:
    """Samples of several values, one after the other."""
    if isinstance(values[0], Tensor):
        return torch.cat(cast(list[Tensor], [*values]))
    return SampleGradients.cat(cast(Sequence[SampleGradients], values))


def completed(gradients: Gradients, known: Gradients) -> dict[str, Value]:
    """The gradients of a batch, with zeros for parameters that it does not reach.

    Args:
        gradients: ``[N, *θ]`` by parameter.
        known: Values of all parameters, for any number of samples: they show shape, form and
            device.

    Raises:
        ShapeError: Some are missing, and the others have different numbers of rows.
    """
    found = dict(gradients)
    lengths = {len(value) for value in gradients.values()}
    for name, like in known.items():
        if name not in found:
            if len(lengths) != 1:
                raise ShapeError(
                    f"A batch does not reach the parameter {name!r}, and the others have different "
                    f"numbers of rows, {sorted(lengths)}: freeze it, or store whole samples."
                )
            found[name] = _zeros(lengths.copy().pop(), like)
    return found


def _zeros(count: int, like: Value) -> Value:
    shape = like.shape[1:]
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    if isinstance(like, Tensor) or len(shape) < 2:
        dense = torch.zeros(count, *shape, **options)
        return dense if isinstance(like, Tensor) else SampleGradients.from_dense(dense)
    # Without positions, this takes no memory.
    out = torch.zeros(count, 0, shape[0], **options)
    return SampleGradients.from_factors(out, out.new_zeros(count, 0, prod(shape[1:])), shape)


def rows(value: Value, chosen: list[int]) -> Value:
    """Some samples; the value itself if all are chosen."""
    return value if chosen == [*range(len(value))] else value[chosen]


def count_of(queries: Gradients, shapes: Mapping[str, torch.Size]) -> int:
    """The number ``M`` of queries ``[M, *θ]`` for some or all parts of a store.

    Args:
        queries: Queries by part.
        shapes: The shape of each part for one sample.

    Raises:
        ShapeError: A query does not fit the part, or parts have different numbers of queries.
        UsageError: ``queries`` is empty, not finite, or has a part that the store does not have.
    """
    if not isinstance(queries, Mapping) or not queries:
        raise UsageError("Queries must be {name: [M, *θ]}, with names of the store's parts.")
    for name, value in queries.items():
        if name not in shapes:
            raise UsageError(f"The store has no part {name!r}. It has {[*shapes][:5]}.")
        if tuple(value.shape[1:]) != tuple(shapes[name]):
            raise ShapeError(
                f"Queries for {name!r} must be [M, {', '.join(map(str, shapes[name]))}]. Got "
                f"{[*value.shape]}."
            )
        if not is_finite(value):
            raise UsageError(f"Queries for {name!r} are not finite: look at their loss.")
    counts = {len(value) for value in queries.values()}
    if len(counts) != 1:
        raise ShapeError(f"All parts of the queries must have one length. Got {sorted(counts)}.")
    return counts.pop()


def inner(samples: Gradients, queries: Gradients) -> Tensor:
    """Inner products summed over the queries' parts, ``[N, M]``; at least in single precision.

    Args:
        samples: ``[N, *θ]`` for each part.
        queries: ``[M, *θ]`` for each part, or for some.
    """
    total: Tensor | None = None
    for name, query in queries.items():
        part = inner_of(samples[name], query)
        total = part if total is None else total + part
    if total is None:
        raise UsageError("Queries are empty: give at least one.")
    return total


def flat(value: Tensor) -> Tensor:
    """A part as rows, ``[N, *θ] → [N, P]``; a parameter may be a single number."""
    return value.unsqueeze(1).flatten(1)


def inner_of(value: Value, query: Value) -> Tensor:
    """Inner products of one part, ``[N, M]``."""
    if isinstance(value, SampleGradients):
        return value.inner(query)
    if isinstance(query, SampleGradients):
        return query.inner(value).T
    dtype = torch.promote_types(torch.promote_types(value.dtype, query.dtype), torch.float32)
    return product(flat(value).to(dtype), flat(query).to(value.device, dtype).T)


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in the precision of both, also where autocast is on."""
    with without_autocast():
        return left @ right


def own_of(value: Value, query: Value) -> Tensor:
    """``⟨g_n, q_n⟩`` of one part, ``[N]``, at least in single precision."""
    if value is query:
        return norm_of(value).square()
    wide = torch.promote_types(value.dtype, torch.float32)
    return flat(dense(value).to(wide) * dense(query).to(wide)).sum(1)


def fitting(gradients: Gradients) -> int:
    """How many samples may be formed at once, within 16 times ``memory_budget()``."""
    single = sum(prod(value.shape[1:]) * value.dtype.itemsize for value in gradients.values())
    return max(1, 16 * memory_budget() // max(1, single))


def cosines(samples: Gradients, queries: Gradients) -> Tensor:
    """Inner products divided by both norms, over the queries' parts, ``[N, M]``; zero for zero."""
    products = inner(samples, normalised(queries))
    return over_norms(products, norm({name: samples[name] for name in queries}))


def normalised(gradients: Gradients) -> dict[str, Value]:
    """Gradients divided by their norms over all parts; those of zero stay zero.

    Inner products of small gradients would underflow.
    """
    norms = norm(gradients)
    inverse = torch.where(norms > 0, 1 / norms, 0)
    return {name: _times(value, inverse) for name, value in gradients.items()}


def _times(value: Value, weights: Tensor) -> Value:
    """``weights[n] g_n``, at least in single precision."""
    wide = value.to(dtype=torch.promote_types(value.dtype, torch.float32))
    if isinstance(wide, SampleGradients):
        return wide.times(weights.to(wide.device))
    return wide * weights.to(wide).reshape(-1, *[1] * (wide.dim() - 1))


def over_norms(products: Tensor, norms: Tensor) -> Tensor:
    """Inner products ``[N, M]`` divided by norms ``[N]``; zero where a norm is zero."""
    return products * torch.where(norms > 0, 1 / norms, 0).to(products).unsqueeze(1)


def norm(gradients: Gradients) -> Tensor:
    """``‖g_n‖`` over all parts, ``[N]``, at least in single precision."""
    return joint([norm_of(value) for value in gradients.values()])


def joint(norms: Sequence[Tensor]) -> Tensor:
    """The norms over all parts from those of each; squares of small ones would underflow."""
    parts = torch.stack([*norms])
    largest = parts.amax(0)
    largest = torch.where(largest > 0, largest, 1)
    found: Tensor = torch.linalg.vector_norm(parts / largest, dim=0) * largest
    return found


def norm_of(value: Value) -> Tensor:
    """``‖g_n‖`` of one part, ``[N]``, at least in single precision."""
    given = SampleGradients.from_dense(value) if isinstance(value, Tensor) else value
    return given.norm()
