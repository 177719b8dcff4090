"""Products of calls that had something else than the samples on axis 0.

Either several entries of axis 0 belong to each sample, or none does and columns are kept apart. The
rule takes those entries for samples, but they are positions: shared by all samples, as rows of a
table are, or each of one sample, as windows are. What arrives tells which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backpack_core.contract.operation import OpenFunction
from backpack_products.affine import AffineProduct
from backpack_products.factors import FactorProduct
from backpack_products.owned import OwnedAffine, gathered
from backpack_products.product import DenseProduct, SampleProduct, regrouped


@regrouped.register
def _regrouped_factors(
    product: FactorProduct, columns: int, samples: int, kept: dict[Any, Any]
) -> SampleProduct:
    out, other = product.out, product.other
    is_apart = out.shape[0] != columns
    if not is_apart and isinstance(product, AffineProduct) and not _is_at_hand(product):
        every = torch.eye(samples, dtype=torch.bool, device=out.device)
        return OwnedAffine(product, every.repeat_interleave(out.shape[1] // max(1, samples), 1))
    count = out.shape[2] * (out.shape[1] if is_apart else out.shape[1] // max(1, samples))
    out = out.reshape(columns, samples, count, *out.shape[3:])
    whole = None if other is None else other[slice(0, other.shape[0])].flatten(0, 1)
    if not is_apart:
        shown = None if whole is None else whole.unflatten(0, (samples, count))
        return product.with_factors(out, shown, None)
    reached = _reached(out, kept)
    layout = _layout(reached)
    if layout is not None:
        before, after = layout
        own = out.unflatten(2, (before, samples, after)).diagonal(dim1=1, dim2=3)
        if whole is not None:
            whole = whole.unflatten(0, (before, samples, after)).movedim(1, 0).flatten(1, 2)
        return product.with_factors(own.movedim(-1, 1).flatten(2, 3), whole, None)
    if samples > 1 and bool((reached.sum(0) == 1).all()):  # each row is one sample's
        own = out[:, reached.int().argmax(0), torch.arange(count)].unsqueeze(2)
        rows = None if whole is None else whole.unsqueeze(1)
        return of_owners(product.with_factors(own, rows, None), reached.to(out.device))
    shown = None if whole is None else whole.expand(samples, *whole.shape)
    return product.with_factors(out, shown, None)


def _is_at_hand(product: AffineProduct) -> bool:
    """Whether factors of samples are views of those of rows."""
    first = product.out.stride(1) == product.positions * product.out.stride(2)
    is_view = isinstance(product.inp, Tensor | None)
    return is_view and (first or product.positions == 1)


@OpenFunction
def of_owners(product: SampleProduct, owned: Tensor) -> SampleProduct:
    """A product ``[V, N, *θ]``, from what a rule gave for rows in no order, ``[V, R, *θ]``.

    Args:
        product: The product of the rule.
        owned: Which rows each sample has, ``[N, R]``.

    Returns:
        For each sample the sum over its rows, in the same form where that is possible.
    """

    def form(some: slice, samples: slice) -> Tensor:
        part = product.part(some, slice(0, product.samples))
        weights = owned[samples].to(part.device, part.dtype)
        return torch.einsum("nr,vr...->vn...", weights, part)

    mat = product.new_zeros(1).expand(product.columns, len(owned))
    return DenseProduct(form=form, mat=mat, shape=product.shape)


@of_owners.register
def _factors_of_owners(product: FactorProduct, owned: Tensor) -> SampleProduct:
    found: SampleProduct = gathered(product, owned.to(product.out.device))
    return found


@of_owners.register
def _affine_of_owners(product: AffineProduct, owned: Tensor) -> SampleProduct:
    owned = owned.to(product.out.device)
    has_one = bool((owned.sum(0) <= 1).all())  # else a sample was named several times
    found: SampleProduct = OwnedAffine(product, owned) if has_one else gathered(product, owned)
    return found


def _reached(out: Tensor, kept: dict[Any, Any]) -> Tensor:
    """Which samples reach which rows, in these columns or in earlier ones. Shape ``[N, B]``."""
    found = (out.detach() != 0).flatten(3).any(-1).any(0).cpu()
    key = ("reached", *found.shape)
    kept[key] = found | kept[key] if key in kept else found
    reached: Tensor = kept[key]
    return reached


def _layout(reached: Tensor) -> tuple[int, int] | None:
    """How axis 0 is made of samples, as ``[before, N, after]``; ``None`` if they share its rows.

    A row of a table is reached by all samples that use it. If each row is reached by one sample at
    most, and in the order of samples, the rows belong to them.
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
