"""Casts products in half precision to single precision."""

from __future__ import annotations

import torch

from backpack_products.product import SampleProduct
from backpack_products.values import is_half


def in_single(product: SampleProduct) -> SampleProduct:
    """Cast a product in half precision to single precision; others do not change."""
    if not is_half(product.like.dtype):
        return product
    if "single" not in product.results:
        wide = product.in_dtype(torch.float32)
        for name in ("name", "module", "rule", "needs", "roots", "is_measured"):
            setattr(wide, name, getattr(product, name))
        product.results["single"] = wide
    cast: SampleProduct = product.results["single"]
    return cast
