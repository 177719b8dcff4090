"""Products of every form, with ``M`` by the definition: all of one parameter, of shape [6, 2]."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from backpack_products import (
    AffineProduct,
    DenseProduct,
    LookupProduct,
    SampleProduct,
    ScaleProduct,
)
from backpack_products.columns import Root
from backpack_products.product import sum_of

COLUMNS, SAMPLES = 3, 4
SHAPE = torch.Size((6, 2))
FIRST, SECOND, THIRD = Root("first"), Root("second"), Root("third")


class Formed(NamedTuple):
    """A product, and what it stands for.

    Attributes:
        product: The product.
        matrix: ``M``, ``[V, N, 6, 2]``, from the same factors by an einsum.
        factors: What both are functions of.
    """

    product: SampleProduct
    matrix: Tensor
    factors: tuple[Tensor, ...]


class Lazy:
    """Inputs that are handed out for some samples only, as patches of a convolution are."""

    def __init__(self, inp: Tensor) -> None:
        self.shape = inp.shape
        self.largest = 0
        self._inp = inp

    def __getitem__(self, rows: slice) -> Tensor:
        part = self._inp[rows]
        self.largest = max(self.largest, len(part))
        return part


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def values(columns: int = COLUMNS) -> Formed:
    mat = leaf(columns, SAMPLES, *SHAPE)
    return Formed(DenseProduct(mat), mat, (mat,))


def parts() -> Formed:
    """Formed in parts, by a function."""
    mat = leaf(COLUMNS, SAMPLES, *SHAPE)
    product = DenseProduct(form=lambda v, n: 2 * mat[v, n], mat=mat, shape=SHAPE)
    return Formed(product, 2 * mat, (mat,))


def affine(
    positions: int, sizes: tuple[int, int, int], columns: int = COLUMNS, lazy: bool = False
) -> Formed:
    """A weight, by reshaping ``[G, O, I]``."""
    groups, features, width = sizes
    out, inp = (
        leaf(columns, SAMPLES, positions, groups, features),
        leaf(SAMPLES, positions, groups, width),
    )
    product = AffineProduct(out, Lazy(inp) if lazy else inp, SHAPE)
    mat = torch.einsum("vnsgo,nsgi->vngoi", out, inp).reshape(columns, SAMPLES, *SHAPE)
    return Formed(product, mat, (out, inp))


def one_input(columns: int = COLUMNS) -> Formed:
    """Groups that multiply the same input, of which there is one copy."""
    out, inp = leaf(columns, SAMPLES, 3, 2, 3), leaf(SAMPLES, 3, 2)
    mat = torch.einsum("vnsgo,nsi->vngoi", out, inp).reshape(columns, SAMPLES, *SHAPE)
    product = AffineProduct(out, inp.unsqueeze(2).expand(-1, -1, 2, -1), SHAPE)
    return Formed(product, mat, (out, inp))


def transposed(positions: int, reverse: bool = False) -> Formed:
    """A weight that is stored as ``[I, O]``, maybe with the inputs in reverse."""
    out, inp = leaf(COLUMNS, SAMPLES, positions, 1, 2), leaf(SAMPLES, positions, 1, 6)
    mat = torch.einsum("vnsgo,nsgi->vnio", out, inp)
    if not reverse:
        product = AffineProduct(out, inp, SHAPE, lambda m: m.squeeze(-3).mT)
        return Formed(product, mat, (out, inp))
    product = AffineProduct(out, inp, SHAPE, lambda m: m.squeeze(-3).mT.flip(-2))
    return Formed(product, mat.flip(2), (out, inp))


def bias(positions: int, columns: int = COLUMNS) -> Formed:
    out = leaf(columns, SAMPLES, positions, 6, 2)
    return Formed(AffineProduct(out, None, SHAPE), out.sum(2), (out,))


def flipped_bias() -> Formed:
    out = leaf(COLUMNS, SAMPLES, 2, 1, 12)

    def arrange(mat: Tensor) -> Tensor:
        return mat.flatten(-2).flip(-1).unflatten(-1, SHAPE)

    mat = out.sum((2, 3)).flip(-1).reshape(COLUMNS, SAMPLES, *SHAPE)
    return Formed(AffineProduct(out, None, SHAPE, arrange), mat, (out,))


def gain(positions: int = 3) -> Formed:
    out, inp = leaf(COLUMNS, SAMPLES, positions, 12), leaf(SAMPLES, positions, 12)
    mat = (out * inp).sum(2).reshape(COLUMNS, SAMPLES, *SHAPE)
    return Formed(ScaleProduct(out, inp, SHAPE), mat, (out, inp))


def offset() -> Formed:
    out = leaf(COLUMNS, SAMPLES, 3, 12)
    mat = out.sum(2).reshape(COLUMNS, SAMPLES, *SHAPE)
    return Formed(ScaleProduct(out, None, SHAPE), mat, (out,))


def table(columns: int = COLUMNS) -> Formed:
    """Rows of a table; the second sample reads one twice, the last none but one."""
    out = leaf(columns, SAMPLES, 3, 2)
    row = torch.tensor([[0, 1, 2], [4, 4, 0], [5, 3, 1], [2, 2, 2]])
    chosen = torch.nn.functional.one_hot(row, 6).to(out.dtype)
    mat = torch.einsum("nkr,vnkd->vnrd", chosen, out)
    return Formed(LookupProduct(out, row, SHAPE), mat, (out,))


def total(*formed: Formed) -> Formed:
    """The sum of several, all for the same columns."""
    product = sum_of([part.product for part in formed])
    mat = torch.stack([part.matrix for part in formed]).sum(0)
    return Formed(product, mat, tuple(factor for part in formed for factor in part.factors))


def rooted(formed: Formed, roots: dict[Root, int]) -> Formed:
    formed.product.roots = roots
    return formed


def placed() -> Formed:
    """Uses that different columns reach: the first root both, the others one of them each."""
    one = rooted(affine(2, (1, 6, 2), columns=2), {FIRST: 1, SECOND: 1})
    other = rooted(table(columns=2), {FIRST: 1, THIRD: 1})
    zeros = torch.zeros(1, SAMPLES, *SHAPE)
    mat = torch.cat([one.matrix, zeros]) + torch.cat([other.matrix[:1], zeros, other.matrix[1:]])
    product = sum_of([one.product, other.product])
    return Formed(product, mat, (*one.factors, *other.factors))


FORMS: dict[str, Callable[[], Formed]] = {
    "values": values,
    "formed in parts": parts,
    "affine": lambda: affine(1, (1, 6, 2)),
    "affine, positions": lambda: affine(5, (1, 6, 2)),
    "affine, groups": lambda: affine(3, (2, 3, 2)),
    "affine, one column": lambda: affine(3, (1, 6, 2), columns=1),
    "affine, groups of one input": one_input,
    "affine, groups of one input, one column": lambda: one_input(columns=1),
    "affine, lazy": lambda: affine(4, (3, 2, 2), lazy=True),
    "affine, arranged": lambda: transposed(1),
    "affine, arranged, positions": lambda: transposed(4),
    "bias": lambda: bias(1),
    "bias, positions": lambda: bias(3),
    "bias, arranged": flipped_bias,
    "gain": gain,
    "offset": offset,
    "table": table,
    "table, one column": lambda: table(columns=1),
    "affine twice": lambda: total(affine(1, (1, 6, 2)), affine(2, (1, 6, 2))),
    "affine in two forms": lambda: total(affine(2, (1, 6, 2)), transposed(3)),
    "affine, arranged twice": lambda: total(transposed(2), transposed(1)),
    "affine in two arrangements": lambda: total(transposed(2), transposed(1, reverse=True)),
    "affine and table": lambda: total(affine(2, (1, 6, 2)), table()),
    "three forms": lambda: total(gain(), table(), values()),
    "different roots": placed,
}
