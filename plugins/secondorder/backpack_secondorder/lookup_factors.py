"""Kronecker factors of look-up tables: the input factor is diagonal.

To look up row ``r`` is to multiply the table by the unit vector ``e_r``. So
``M[v, n] = Σ_k e_{r[n, k]} ⊗ g[v, n, k]`` is an affine product whose inputs are unit vectors, and
``Σ_k e eᵀ`` is diagonal, with the number of look-ups of each row. Importing this file registers its
operations.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from backpack_products import LookupProduct, SampleProduct
from backpack_products.operations import square_sum
from backpack_products.scale import TableProduct
from backpack_secondorder import covariances
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.factors import WeightSharing, eigenvalues_in, kronecker_factors
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.matrix import ParameterOrder


@kronecker_factors.register
def kronecker_factors_lookup(
    product: LookupProduct, sharing: WeightSharing = "kfc"
) -> KroneckerFactors:
    """``[B, A]`` as for a linear layer, ``A`` a vector ``[num]``: the diagonal, times ``1/N``.

    With ``"reduce"``, the mean over positions is not a unit vector, and ``A`` is ``[num, num]``.
    Look-ups of the padding row count like all others.
    """
    out = product.out  # [V, N, K, dim]
    expanded = sharing == "expand"
    vectors = rearrange(out, "v n k d -> (v n k) d") if expanded else out.sum(2).flatten(0, 1)
    outer = covariances.outer(vectors.unsqueeze(1)).squeeze(0)
    return KroneckerFactors([outer, _inputs(product, sharing)], _order(product))


@eigenvalues_in.register
def eigenvalues_in_lookup(product: LookupProduct, basis: KroneckerEigenbasis) -> Tensor:
    """Rotate the columns only: ``A`` is diagonal, so its eigenvectors are unit vectors."""
    if not _is_of_rows(basis):
        return eigenvalues_in.definition(product, basis)
    outer = basis.vectors[0]
    columns = product.out if outer is None else product.out @ outer
    rotated = LookupProduct(columns, product.row, product.shape)
    return square_sum(rotated).T.reshape(basis.values.shape)


@kronecker_factors.register
def kronecker_factors_table(
    product: TableProduct, sharing: WeightSharing = "kfc"
) -> KroneckerFactors:
    """The factors of a table that is added to all samples, as for ``Embedding(positions)``.

    Each position looks up one row, so ``A = 1/N Σ_n Σ_k e eᵀ`` is the identity (with zeros for rows
    that are not added), and all rows share ``B``.
    """
    return KroneckerFactors(kronecker_factors_lookup(lookups(product), sharing), _order(product))


@eigenvalues_in.register
def eigenvalues_in_table(product: TableProduct, basis: KroneckerEigenbasis) -> Tensor:
    """The eigenvalues of the look-ups that the table stands for, if these have a diagonal."""
    if not _is_of_rows(basis):  # which has vectors in the shape of the table
        return eigenvalues_in.definition(product, basis)
    return eigenvalues_in_lookup(lookups(product), basis)


def _is_of_rows(basis: KroneckerEigenbasis) -> bool:
    """Whether the input factor is diagonal; that of means over positions is not."""
    return len(basis.vectors) == 2 and basis.vectors[1] is None


def lookups(product: TableProduct) -> LookupProduct:
    """The look-ups that an added table stands for."""
    (columns, samples, uses), dim = product.out.shape[:3], product.shape[-1]
    num = product.shape.numel() // dim
    out = product.out.reshape(columns, samples, uses, num, dim)
    rows = torch.arange(num, device=out.device)
    if product.used is not None:
        rows = product.used.nonzero().flatten().to(out.device)
        out = out[..., rows, :]
    is_own = product.is_own
    is_own = None if is_own is None else is_own.repeat_interleave(len(rows), 1)
    row = rows.repeat(uses).expand(samples, uses * len(rows))
    lookup = LookupProduct(out.flatten(2, 3), row, torch.Size((num, dim)), is_own)
    return lookup.placed_as(product)


def _inputs(product: LookupProduct, sharing: WeightSharing) -> Tensor:
    """``A``, computed once for a call: chunks of columns share the same inputs."""
    key = ("lookups", product.name, product.row.shape, sharing, product.like.dtype)
    if key not in product.call_cache:
        product.call_cache[key] = _count(product, sharing)
    factor: Tensor = product.call_cache[key]
    return factor


def _count(product: LookupProduct, sharing: WeightSharing) -> Tensor:
    row, is_own = product.row, product.is_own
    if is_own is None:
        is_own = torch.ones_like(row, dtype=torch.bool)
    samples = len(row)
    if sharing != "reduce":
        # Look-ups of other samples count as zero: the host would have to wait to leave them out.
        counts = torch.zeros(product.shape[0], dtype=torch.long, device=row.device)
        counts.scatter_add_(0, row.flatten(), is_own.flatten().long())
        total = is_own.sum().clamp(min=1) if sharing == "expand" else max(1, samples)
        return counts.to(product.like.dtype) / total
    means = product.new_zeros(samples, product.shape[0])
    share = is_own.to(means.dtype) / is_own.sum(1, keepdim=True).clamp(min=1)
    means = means.scatter_add(1, row, share)
    return means.T @ means / max(1, samples)


def _order(product: SampleProduct) -> ParameterOrder:
    """The order with features first, as for other weights; a table stores its rows first."""
    numbers = torch.arange(product.shape.numel(), device=product.like.device)
    return ParameterOrder.of(product, numbers.reshape(-1, product.shape[-1]).T.flatten())
