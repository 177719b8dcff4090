"""Products at operands that no sample has a part in: what autograd saved there is the other factor.

A parameter that a function uses (``F.linear(x, self.weight)``) is such an operand. What is sent to
it of every sample apart has a form, as at a module, and stays in it on the way to the parameter, as
long as nothing but the order of entries changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node, metadata_of
from backpack_core.contract.affine import AffineProduct
from backpack_core.contract.columns import ApartColumns, Columns, Root
from backpack_core.contract.operations import dense
from backpack_core.contract.product import DenseProduct, SampleProduct, sum_of
from backpack_core.contract.regrouping import regrouped
from backpack_core.discovery import version_of
from backpack_core.graph import bridge, nodes


class Operand(NamedTuple):
    """An operand that no sample has a part in.

    Attributes:
        node: The operation, which autograd has not executed yet; it may be asked for what it saved.
        position: Which operand it is, in ``node.next_functions``.
        shape: Its shape.
        is_apart: Whether columns are of every sample apart, and not of samples in front.
    """

    node: Any
    position: int
    shape: torch.Size
    is_apart: bool


Maker = Callable[[Operand, Tensor], SampleProduct | None]
_MAKERS: dict[str, dict[str, Maker]] = {}  # by operation, and by package


class FactoredColumns(ApartColumns):
    """Columns of every sample apart, as products ``[V, N, *]`` that are formed if need be."""

    def __init__(self, products: Mapping[Root, Sequence[SampleProduct]]) -> None:
        """Store what is to be added up of each root."""
        self.products = products

    @cached_property
    def blocks(self) -> Mapping[Root, Tensor]:  # type: ignore[override]
        """Formed, when somebody wants that."""
        parts = self.products.items()
        return {root: reduce(torch.add, map(dense, some)) for root, some in parts}

    @property
    def sizes(self) -> dict[Root, int]:
        """How many columns each root has."""
        return {root: some[0].columns for root, some in self.products.items()}

    def like(self, blocks: Mapping[Root, Tensor]) -> Columns:
        """What is computed from these is formed."""
        return ApartColumns(blocks)

    def to(self, dtype: torch.dtype) -> Columns:
        """In their form, if they have the precision."""
        known = {product.like.dtype for some in self.products.values() for product in some}
        return self if known == {dtype} else super().to(dtype)

    def merge(self, other: Columns) -> Columns:
        """Side by side; what is formed is a product, too."""
        if isinstance(other, FactoredColumns):
            added = other.products
        else:
            added = {root: [DenseProduct(block)] for root, block in other.blocks.items()}
        roots = {**self.products, **added}
        return FactoredColumns({r: [*self.products.get(r, ()), *added.get(r, ())] for r in roots})

    def product(self) -> SampleProduct:
        """The product of all columns, side by side."""
        for root, some in self.products.items():
            for product in some:
                product.roots = {root: product.columns}
        return sum_of([product for some in self.products.values() for product in some])

    def through(self, node: Node) -> FactoredColumns | None:
        """Behind a node that changes the order of entries alone; ``None`` at any other."""
        every = [product for some in self.products.values() for product in some]
        is_known = nodes.operation_of(node) in nodes.VIEWS | nodes.TURNS | {"Clone"}
        if not is_known or not all(isinstance(product, AffineProduct) for product in every):
            return None
        ((child, number),) = node.next_functions
        assert child is not None
        turned = partial(_turned, node=node, shape=nodes.shape_of(child, number))
        return FactoredColumns({r: [*map(turned, some)] for r, some in self.products.items()})


def _turned(product: Any, node: Any, shape: torch.Size) -> AffineProduct:
    """An affine product behind a node that puts entries into another order."""
    count, device = len(product.sizes), product.like.device
    blank = torch.empty(product.sizes, dtype=torch.int8, device=device)
    seen = node(product.to_parameter(blank))
    if seen.is_contiguous() and seen.data_ptr() == blank.data_ptr():
        return AffineProduct(product.out, product.inp, shape)  # the order is that of the factors
    numbers = torch.arange(shape.numel(), device=device).reshape(product.sizes)
    order: Tensor = node(product.to_parameter(numbers)).flatten()

    def arrange(mat: Tensor) -> Tensor:
        return mat.flatten(-count)[..., order].reshape(*mat.shape[:-count], *shape)

    return AffineProduct(product.out, product.inp, shape, arrange)


def products_at(*operations: str) -> Callable[[Maker], Maker]:
    """Register what gives products at operands of an operation, by the name of its node.

    It is given an :class:`Operand` and columns ``[V, R, *out]``, with the entries of axis 0 in the
    place of samples, and returns a product ``[V, R, *θ]``; ``None`` where it knows no form. Where
    columns are of every sample apart, ``R`` may be any other axis that is summed over.
    """

    def register(make: Maker) -> Maker:
        for name in operations:
            _MAKERS.setdefault(name, {})[make.__module__.partition(".")[0]] = make
        return make

    return register


def operand_product(
    node: Node, position: int, columns: Columns, root: Root, samples: int
) -> SampleProduct | None:
    """What is sent to an operand of every sample apart, in some form.

    Args:
        node: An autograd node that autograd has not executed yet, with one output.
        position: Where the operand is, in ``node.next_functions``.
        columns: At its output, with samples in front, or of every sample apart.
        root: Which of them.
        samples: ``N``.

    Returns:
        A product ``[V, N, *operand]``; ``None`` where no form is known.
    """
    name, (child, number) = nodes.operation_of(node), node.next_functions[position]
    mat, is_apart = columns.blocks[root], isinstance(columns, ApartColumns)
    count = len(mat)
    mat = mat.flatten(0, 1) if is_apart else mat
    if name not in _MAKERS or child is None or mat.dim() < 3 or not mat.numel():
        return None
    if not mat.dtype.is_floating_point or mat.dtype != metadata_of(child, number).dtype:
        return None
    operand = Operand(node, position, nodes.shape_of(child, number), is_apart)
    with bridge.saved_at(node):
        product = version_of(_MAKERS[name], f"products_at/{name}")(operand, mat)
    if product is None or (product.columns, product.samples) == (count, samples):
        return product
    return regrouped(product, count, samples, {})
