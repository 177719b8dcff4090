"""Products of calls that saw something else on axis 0 than the samples.

Either several entries of it belong to each sample, or none does and columns came for every sample
apart. What the rule took for samples are then more positions.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from backpack_core.contract.affine import AffineProduct
from backpack_core.contract.contractions import Rows
from backpack_core.contract.lookup import LookupProduct
from backpack_core.contract.product import DenseProduct, SampleProduct
from backpack_core.contract.scale import ScaleProduct


@singledispatch
def regrouped(product: SampleProduct, columns: int, samples: int) -> SampleProduct:
    """A product ``[V, N, *θ]``, from one of ``[V · N, B, *θ]`` or ``[V, N · B, *θ]``.

    Args:
        product: What a rule gave.
        columns: ``V``.
        samples: ``N``.

    Returns:
        The sum over ``B``, in the same form where that is possible.
    """
    count = product.samples if product.columns != columns else product.samples // max(1, samples)
    is_apart = product.columns != columns

    def form(some: slice, rows: slice) -> Tensor:
        first, last, _ = rows.indices(samples)
        whole = slice(0, product.samples)
        if not is_apart:
            part = product.part(some, slice(first * count, last * count))
            found: Tensor = part.unflatten(1, (last - first, count)).sum(2)
            return found
        parts = [
            product.part(slice(v * samples + first, v * samples + last), whole).sum(1)
            for v in range(*some.indices(columns))
        ]
        return torch.stack(parts)

    mat = product.new_zeros(1).expand(columns, samples)
    return DenseProduct(form=form, mat=mat, shape=product.shape)


@regrouped.register
def _regrouped_affine(product: AffineProduct, columns: int, samples: int) -> SampleProduct:
    out = product.out.reshape(columns, samples, -1, *product.out.shape[3:])
    inp = None if product.inp is None else _shared(product.inp, samples, out.shape[2])
    return AffineProduct(out, inp, product.shape, product.arrange)


@regrouped.register
def _regrouped_scale(product: ScaleProduct, columns: int, samples: int) -> SampleProduct:
    out = product.out.reshape(columns, samples, -1, product.out.shape[3])
    inp = None if product.inp is None else _shared(product.inp, samples, out.shape[2])
    return ScaleProduct(out, inp, product.shape)


@regrouped.register
def _regrouped_lookup(product: LookupProduct, columns: int, samples: int) -> SampleProduct:
    out = product.out.reshape(columns, samples, -1, product.out.shape[3])
    row = _shared(product.row, samples, out.shape[2])
    return LookupProduct(out, row, product.shape)


def _shared(rows: Rows, samples: int, positions: int) -> Tensor:
    """``[B, S, *]`` as ``[N, positions, *]``: those of each sample, or the same for all."""
    whole = rows[slice(0, rows.shape[0])]
    flat = whole.flatten(0, 1)
    if len(flat) != samples * positions:
        return flat.expand(samples, *flat.shape)
    found: Tensor = flat.unflatten(0, (samples, positions))
    return found
