"""Inner products by blocks of a parameter along one of its axes, such as heads or experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_firstorder.pairs import Pairing, pairs
from backpack_firstorder.plain import plain_terms
from backpack_products.affine import AffineProduct
from backpack_products.lookup import LookupProduct
from backpack_products.product import DenseProduct, SampleProduct, SumProduct
from backpack_products.rows import whole
from backpack_products.values import is_flag

Block: TypeAlias = tuple[int, int]  # an axis of the parameter, and how many blocks it has there


def see_blocks(blocks: Any) -> dict[str, Block]:
    """Check an argument ``blocks`` and return it.

    Raises:
        UsageError: The argument has the wrong form.
    """
    checked: dict[str, Any] = {} if blocks is None else blocks
    if not isinstance(checked, Mapping) or not all(map(_is_block, checked.values())):
        raise UsageError(
            "blocks must be {name: (axis, count)}, such as {'h.0.attn.c_proj.weight': (0, 12)} for "
            f"twelve heads. Got {blocks!r:.80}."
        )
    return dict(checked)


def _is_block(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(isinstance(n, int) and not is_flag(n) for n in value) and value[1] > 0


def pairs_by_block(
    first: SampleProduct, second: SampleProduct, name: str, block: Block, form: Pairing | None
) -> Tensor:
    """:func:`pairs` of each block, ``[N, M, B]``; their sum is that of the whole parameter.

    Args:
        first: Gradients of one column, ``[1, N, *θ]``.
        second: Others, ``[1, M, *θ]``.
        name: The parameter's name, for messages.
        block: The axis of ``θ``, and ``B``.
        form: As for :func:`pairs`.

    Raises:
        UsageError: The axis has no such blocks.
    """
    axis, count = block
    shape = first.shape
    if not -len(shape) <= axis < len(shape) or shape[axis] % count:
        raise UsageError(
            f"The parameter {name!r} has the shape {[*shape]}, and its axis {axis} does not split "
            f"into {count} blocks of one length. Give (axis, count) with a count that divides it."
        )
    axis %= len(shape)
    both = zip(_cut(first, axis, count), _cut(second, axis, count), strict=True)
    return torch.stack([pairs(one, other, form) for one, other in both], -1)


def _cut(product: SampleProduct, axis: int, count: int) -> Iterator[SampleProduct]:
    """The blocks of a product, one after the other."""
    terms, length = plain_terms(product), product.shape[axis] // count
    for number in range(count):
        some = slice(number * length, (number + 1) * length)
        shape = torch.Size((*product.shape[:axis], length, *product.shape[axis + 1 :]))
        parts = [_of_block(term, axis, some, shape) for term in terms]
        yield parts[0] if len(parts) == 1 else SumProduct(parts)


def _of_block(term: SampleProduct, axis: int, some: slice, shape: torch.Size) -> SampleProduct:
    """A term restricted to some entries of an axis; in factors, if one of them has the axis."""
    if isinstance(term, LookupProduct) and axis == 1:
        return LookupProduct(term.out[..., some], term.row, shape)
    if isinstance(term, AffineProduct) and term.inp is not None and term.has_rows:
        if term.sizes[0] == 1 and axis == 0:
            return AffineProduct(term.out[..., some], term.inp, shape)
        if term.sizes[0] == 1 and len(shape) == 2:
            return AffineProduct(term.out, whole(term.inp)[..., some], shape)
    place = (slice(None),) * (axis + 2) + (some,)
    if isinstance(term, DenseProduct) and term.values is not None:
        return DenseProduct(term.values[place])

    def form(columns: slice, samples: slice) -> Tensor:
        return term.part(columns, samples)[place]

    mat = term.new_zeros(1).expand(term.columns, term.samples)
    return DenseProduct(form=form, mat=mat, shape=shape)
