"""Casts products in half precision to single precision."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from backpack_products.affine import AffineProduct
from backpack_products.lookup import LookupProduct
from backpack_products.product import DenseProduct, SampleProduct, SumProduct
from backpack_products.rows import Rows
from backpack_products.scale import ScaleProduct
from backpack_products.values import at_least_single, is_half


def in_single(product: SampleProduct) -> SampleProduct:
    """Cast a product in half precision to single precision; others do not change."""
    if not is_half(product.like.dtype):
        return product
    if "single" not in product.results:
        wide = _in_single(product)
        for name in ("name", "module", "rule", "needs", "roots", "is_measured"):
            setattr(wide, name, getattr(product, name))
        product.results["single"] = wide
    cast: SampleProduct = product.results["single"]
    return cast


@singledispatch
def _in_single(product: SampleProduct) -> SampleProduct:
    def form(columns: slice, samples: slice) -> Tensor:
        return at_least_single(product.part(columns, samples))

    like = product.like.new_ones(product.columns, product.samples, dtype=torch.float32)
    return DenseProduct(form=form, mat=like, shape=product.shape)


@_in_single.register
def _in_single_affine(product: AffineProduct) -> AffineProduct:
    inp = product.inp
    if inp is not None:
        inp = at_least_single(inp) if isinstance(inp, Tensor) else WideRows(inp)
    return AffineProduct(at_least_single(product.out), inp, product.shape, product.arrange)


@_in_single.register
def _in_single_scale(product: ScaleProduct) -> ScaleProduct:
    inp = None if product.inp is None else at_least_single(product.inp)
    return ScaleProduct(at_least_single(product.out), inp, product.shape)


@_in_single.register
def _in_single_lookup(product: LookupProduct) -> LookupProduct:
    return LookupProduct(at_least_single(product.out), product.row, product.shape)


@_in_single.register
def _in_single_sum(product: SumProduct) -> SumProduct:
    return SumProduct([in_single(part) for part in product.parts])


class WideRows:
    """Inputs ``[N, S, G, I]`` in single precision, for some samples at a time."""

    def __init__(self, inp: Rows) -> None:
        """Store the inputs."""
        self._inp, self.shape = inp, inp.shape

    def __getitem__(self, rows: slice, /) -> Tensor:
        """The inputs of some samples."""
        return at_least_single(self._inp[rows])
