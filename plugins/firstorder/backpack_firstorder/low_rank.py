"""Low-rank approximations of per-sample gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_products.affine import AffineProduct
from backpack_products.contractions import slices
from backpack_products.product import SampleProduct
from backpack_products.rows import whole
from backpack_products.tuning import memory_budget
from backpack_products.values import at_least_single

Factors = tuple[Tensor, Tensor]


def nearest_factors(product: SampleProduct, size: tuple[int, int], rank: int) -> Factors | None:
    """The best factors ``[N, c, O]`` and ``[N, c, I]``; ``None`` if they would not save anything.

    Args:
        product: A product of one column, ``[1, N, *θ]``.
        size: Rows and columns of the parameter.
        rank: ``c``.
    """
    if not isinstance(product, AffineProduct) or product.inp is None or product.sizes[0] > 1:
        return _of_formed(product, size, rank)
    if product.positions <= rank:
        return None
    return _of_affine(product.out[0, :, :, 0], whole(product.inp)[:, :, 0], rank)


def _of_affine(out: Tensor, inp: Tensor, rank: int) -> Factors:
    """The factors of ``Σ_s out[n, s] ⊗ inp[n, s]``, from ``[N, S, O]`` and ``[N, S, I]``."""
    left, right = at_least_single(out), at_least_single(inp)
    # Orthogonal bases of the spans of the factors, unless these are the whole space.
    left_base, left = _reduced(left.mT)  # [N, O, k], [N, k, S]
    right_base, right = _reduced(right.mT)
    factors = _truncated(left @ right.mT, rank)
    left_out, right_out = factors[0] @ left_base.mT, factors[1] @ right_base.mT
    return left_out.to(out.dtype), right_out.to(out.dtype)


def _of_formed(product: SampleProduct, size: tuple[int, int], rank: int) -> Factors:
    """The factors of gradients that are formed, some samples at a time."""
    single = max(1, product.shape.numel() * product.like.element_size())
    factors = []
    for some in slices(product.samples, memory_budget() // single):
        part = product.part(slice(0, 1), some).reshape(-1, *size)
        factors.append(_truncated(at_least_single(part), rank))
    left, right = (torch.cat(parts) for parts in zip(*factors, strict=True))
    return left.to(product.like.dtype), right.to(product.like.dtype)


def _reduced(mat: Tensor) -> Factors:
    if mat.shape[1] <= mat.shape[2]:
        eye = torch.eye(mat.shape[1], dtype=mat.dtype, device=mat.device)
        return eye.expand(len(mat), *eye.shape), mat
    factors: Factors = torch.linalg.qr(mat)
    return factors


def _truncated(mat: Tensor, rank: int) -> Factors:
    """The largest singular values of ``[N, O, I]``, split evenly: ``[N, c, O]``, ``[N, c, I]``."""
    left, values, right = torch.linalg.svd(mat, full_matrices=False)
    roots = values[:, :rank].sqrt().unsqueeze(2)
    return left[:, :, :rank].mT * roots, right[:, :rank] * roots
