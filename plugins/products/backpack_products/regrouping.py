"""Products of calls that did not have one row per sample on axis 0.

A rule treats the entries of axis 0 as samples. If they are not, they are positions: either several
belong to each sample (windows of an image), or all samples share them (rows of a table), and
columns are kept apart. What a rule computed from parameters alone is a table. Of other rows, the
zeros in the columns tell it: they are shared if one of them is reached by several samples. Such
rows are taken for shared in later passes, without another look, which would wait for the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backpack_products.affine import AffineProduct
from backpack_products.factors import FactorProduct
from backpack_products.open_functions import OpenFunction
from backpack_products.owned import OwnedAffine, gathered
from backpack_products.product import IS_TABLE, SHARED_ROWS, DenseProduct, SampleProduct, regrouped


@regrouped.register
def _regrouped_factors(
    product: FactorProduct, columns: int, samples: int, kept: dict[Any, Any]
) -> SampleProduct:
    """The product of samples in factors: entries of axis 0 become positions."""
    out, other = product.out, product.other
    is_apart = out.shape[0] != columns
    if not is_apart and isinstance(product, AffineProduct) and not _are_views(product):
        every = torch.eye(samples, dtype=torch.bool, device=out.device)
        return OwnedAffine(product, every.repeat_interleave(out.shape[1] // max(1, samples), 1))
    count = out.shape[2] * (out.shape[1] if is_apart else out.shape[1] // max(1, samples))
    out = out.reshape(columns, samples, count, *out.shape[3:])
    whole = None if other is None else other[slice(0, other.shape[0])].flatten(0, 1)
    if not is_apart:
        rows = None if whole is None else whole.unflatten(0, (samples, count))
        return product.with_factors(out, rows, None)
    shared, form = kept.get(SHARED_ROWS, set()), (samples, count)
    if not (kept.get(IS_TABLE) or form in shared):
        reached = _reached(out, kept)
        layout = _layout(reached)
        if layout is not None:
            before, after = layout
            own = out.unflatten(2, (before, samples, after)).diagonal(dim1=1, dim2=3)
            if whole is not None:
                whole = whole.unflatten(0, (before, samples, after)).movedim(1, 0).flatten(1, 2)
            return product.with_factors(own.movedim(-1, 1).flatten(2, 3), whole, None)
        owner = _owner(reached) if samples > 1 else None
        if owner is not None:
            own = out[:, owner, torch.arange(count)].unsqueeze(2)
            rows = None if whole is None else whole.unsqueeze(1)
            owned = owner == torch.arange(samples, device="cpu").unsqueeze(1)
            return of_owners(product.with_factors(own, rows, None), owned.to(out.device))
        shared.add(form)
    rows = None if whole is None else whole.expand(samples, *whole.shape)
    return product.with_factors(out, rows, None)


def _are_views(product: AffineProduct) -> bool:
    """Whether the factors of samples are views of the factors of rows."""
    first = product.out.stride(1) == product.positions * product.out.stride(2)
    is_view = isinstance(product.inp, Tensor | None)
    return is_view and (first or product.positions == 1)


@OpenFunction
def of_owners(product: SampleProduct, owned: Tensor) -> SampleProduct:
    """The product ``[V, N, *θ]`` from a product of rows in no order, ``[V, R, *θ]``.

    Args:
        product: The product of rows.
        owned: The mask of rows of each sample, ``[N, R]``.

    Returns:
        For each sample the sum over its rows, in the same form if possible.
    """

    def form(some: slice, samples: slice) -> Tensor:
        part = product.part(some, slice(0, product.samples))
        weights = owned[samples].to(part.device, part.dtype)
        return torch.einsum("nr,vr...->vn...", weights, part)

    mat = product.new_zeros(1).expand(product.columns, len(owned))
    return DenseProduct(form=form, mat=mat, shape=product.shape)


@of_owners.register
def _factors_of_owners(product: FactorProduct, owned: Tensor) -> SampleProduct:
    whole: SampleProduct = gathered(product, owned.to(product.out.device))
    return whole


@of_owners.register
def _affine_of_owners(product: AffineProduct, owned: Tensor) -> SampleProduct:
    owned = owned.to(product.out.device)
    has_one = bool((owned.sum(0) <= 1).all())  # not if ``subsampling`` names a sample twice
    whole: SampleProduct = OwnedAffine(product, owned) if has_one else gathered(product, owned)
    return whole


def _reached(out: Tensor, kept: dict[Any, Any]) -> Tensor:
    """Which samples reach which rows, in these columns or in earlier ones. Shape ``[N, B]``."""
    now = (out.detach() != 0).flatten(3).any(-1).any(0).cpu()
    key = ("reached", *now.shape)
    kept[key] = now | kept[key] if key in kept else now
    reached: Tensor = kept[key]
    return reached


def _owner(reached: Tensor) -> Tensor | None:
    """The sample that each row belongs to, ``[B]``; ``None`` if several samples reach one.

    A row that no sample reaches, as one with only dead neurons, goes with the row before it.
    """
    if bool((reached.sum(0) > 1).any()):
        return None
    numbers = torch.arange(reached.shape[1], device="cpu")
    known = torch.where(reached.any(0), numbers, 0).cummax(0).values
    return reached.int().argmax(0)[known]


def _layout(reached: Tensor) -> tuple[int, int] | None:
    """The factors ``(before, after)`` of axis 0 as ``[before, N, after]``; else ``None``.

    The rows of a table are reached by all samples that use them. If each row is reached by at most
    one sample, and samples are in order, the rows belong to the samples.
    """
    samples, rows = reached.shape
    used = reached.any(0).nonzero().flatten()
    if not reached.numel() or rows % samples or reached.sum(0).max() > 1:
        return None
    share, owner = rows // samples, reached.int().argmax(0)[used]
    for after in range(share, 0, -1):
        if share % after == 0 and torch.equal(used // after % samples, owner):
            return share // after, after
    return None
