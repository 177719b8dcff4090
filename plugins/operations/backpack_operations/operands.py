"""Products in factors at operands without samples: autograd saved the other factor at the node.

A parameter that a function uses (``F.linear(x, self.weight)``) is such an operand. What is sent to
it, apart by sample, has two factors, as at a module. It keeps that form on the way to the parameter
as long as only the order of its entries changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.discovery import preferred_version
from backpack_core.record.storage import storage
from backpack_operations import nodes
from backpack_operations._torch import metadata_of
from backpack_operations.bridge import push
from backpack_products.affine import AffineProduct
from backpack_products.columns import ApartColumns, Columns, Root, require_one_form
from backpack_products.factors import FactorProduct
from backpack_products.operations import dense
from backpack_products.product import DenseProduct, SampleProduct, regrouped, sum_of
from backpack_products.scale import TableProduct
from backpack_products.values import is_same_memory


class Operand(NamedTuple):
    """An operand of an operation that is the same for all samples.

    Attributes:
        node: The node of the operation, not executed yet; it may be asked for what it saved.
        position: The position of the operand in ``node.next_functions``.
        shape: Its shape.
        is_apart: Whether the columns at the output are kept apart, rather than having samples in
            front.
    """

    node: Any
    position: int
    shape: torch.Size
    is_apart: bool


Maker = Callable[[Operand, Tensor], SampleProduct | None]
_MAKERS: dict[str, dict[str, Maker]] = {}  # by operation and package


class FactoredColumns(ApartColumns):
    """Columns of every sample apart, as products ``[V, N, *]`` that are formed only if need be."""

    def __init__(self, products: Mapping[Root, Sequence[SampleProduct]]) -> None:
        """Store the products of each root, which are to be added."""
        self.products = products

    @cached_property
    def blocks(self) -> Mapping[Root, Tensor]:  # type: ignore[override]
        """The formed columns."""
        parts = self.products.items()
        return {root: reduce(torch.add, map(dense, some)) for root, some in parts}

    @property
    def sizes(self) -> dict[Root, int]:
        """How many columns each root has."""
        return {root: some[0].columns for root, some in self.products.items()}

    def to(self, dtype: torch.dtype) -> Columns:
        """Unchanged if the products have the dtype already; else formed."""
        known = {product.like.dtype for some in self.products.values() for product in some}
        return self if known == {dtype} else super().to(dtype)

    def merge(self, other: Columns) -> Columns:
        """Keep the products of both; formed columns count as a product, too."""
        if isinstance(other, FactoredColumns):
            added = other.products
        else:
            require_one_form(other, ApartColumns(other.blocks))
            added = {root: [DenseProduct(block)] for root, block in other.blocks.items()}
        roots = {**self.products, **added}
        return FactoredColumns({r: [*self.products.get(r, ()), *added.get(r, ())] for r in roots})

    def product(self) -> SampleProduct:
        """One product of all columns, side by side; of one operand, a use for all roots."""
        uses: dict[Any, dict[Root, SampleProduct]] = {}
        for root, some in self.products.items():
            for place, product in enumerate(some):
                met = getattr(product, "other", None)
                use = uses.setdefault((root, place) if met is None else id(met), {})
                if root in use:
                    use = uses.setdefault((root, place), {})
                use[root] = product
        return sum_of([_side_by_side(use) for use in uses.values()])

    def through(self, node: Node) -> FactoredColumns | None:
        """The same behind a node that reorders entries, or takes rows; ``None`` at others."""
        kinds = {type(product) for some in self.products.values() for product in some}
        operation = nodes.operation_of(node)
        maker: Any = None
        are_affine = all(issubclass(kind, AffineProduct) for kind in kinds)
        if are_affine and operation in nodes.VIEWS | nodes.TURNS | {"Clone"}:
            maker = _turned
        elif kinds == {TableProduct} and operation in nodes.VIEWS | {"Clone", "Slice", "Select"}:
            maker = _with_rows
        if maker is None:
            return None
        ((child, number),) = node.next_functions
        assert child is not None
        turned = partial(maker, node=node, shape=nodes.shape_of(child, number))
        found = {root: [*map(turned, some)] for root, some in self.products.items()}
        return None if None in chain(*found.values()) else FactoredColumns(found)


def _with_rows(product: TableProduct, node: Node, shape: torch.Size) -> TableProduct | None:
    """A product of a table behind a node that takes some of its rows."""
    return product.behind(lambda mats: push(node, {0: mats})[0], shape)


def _turned(product: Any, node: Any, shape: torch.Size) -> AffineProduct:
    """An affine product behind a node that reorders the entries of the parameter."""
    count, device = len(product.sizes), product.like.device
    blank = torch.empty(product.sizes, dtype=torch.int8, device=device)
    seen = node(product.to_parameter(blank))
    if seen.is_contiguous() and is_same_memory(seen, blank):
        # Ordered as the factors.
        return AffineProduct(product.out, product.inp, shape, is_own=product.is_own)
    numbers = torch.arange(shape.numel(), device=device).reshape(product.sizes)
    order: Tensor = node(product.to_parameter(numbers)).flatten()

    def arrange(mat: Tensor) -> Tensor:
        found = mat.flatten(-count)[..., order.to(mat.device)]
        return found.reshape(*mat.shape[:-count], *shape)

    return AffineProduct(product.out, product.inp, shape, arrange, product.is_own)


def products_at(*operations: str) -> Callable[[Maker], Maker]:
    """Register a function that makes products at operands of some operations, named as their nodes.

    The function is given an :class:`Operand` and columns ``[V, R, *out]``, and returns a product
    ``[V, R, *θ]``; ``None`` if it knows no form. ``R`` counts the entries of axis 0, which take the
    place of samples. If columns are kept apart, ``R`` may be any other axis that is summed over.
    """

    def register(make: Maker) -> Maker:
        for name in operations:
            _MAKERS.setdefault(name, {})[make.__module__.partition(".")[0]] = make
        return make

    return register


def operand_product(
    node: Node, position: int, columns: Columns, samples: int
) -> SampleProduct | None:
    """The product at an operand that is the same for all samples.

    Args:
        node: An autograd node that autograd has not executed yet, with one output.
        position: The position of the operand in ``node.next_functions``.
        columns: At the node's output, with samples in front, or kept apart.
        samples: ``N``.

    Returns:
        A product ``[V, N, *operand]``; ``None`` where no form is known.
    """
    name, (child, number) = nodes.operation_of(node), node.next_functions[position]
    mat, is_apart = columns.mat, isinstance(columns, ApartColumns)
    count = len(mat)
    mat = mat.flatten(0, 1) if is_apart else mat
    if name not in _MAKERS or child is None or mat.dim() < 3 or not mat.numel():
        return None
    if not mat.dtype.is_floating_point or mat.dtype != metadata_of(child, number).dtype:
        return None
    operand = Operand(node, position, nodes.shape_of(child, number), is_apart)
    with storage().reading(node):
        product = preferred_version(_MAKERS[name], f"products_at/{name}")(operand, mat)
    if product is None:
        return None
    lasting: SampleProduct = product.lasting()  # read when autograd gets to the operand
    if (lasting.columns, lasting.samples) == (count, samples):
        return lasting
    return regrouped(lasting, count, samples, {})


def by_root(product: SampleProduct, sizes: Mapping[Root, int]) -> dict[Root, list[SampleProduct]]:
    """The columns of each root, from a product of all; what the operand meets is one object."""
    starts = [0, *accumulate(sizes.values())]
    pairs = zip(sizes.items(), starts, strict=False)
    return {r: [product if len(sizes) == 1 else _some(product, s, n)] for (r, n), s in pairs}


def _some(product: SampleProduct, start: int, count: int) -> SampleProduct:
    """Some columns of a product, in its form."""
    if isinstance(product, FactorProduct):
        some = product.out[start : start + count]
        return product.with_factors(some, product.other, product.is_own)

    def form(columns: slice, samples: slice) -> Tensor:
        first, last, _ = columns.indices(count)
        return product.part(slice(start + first, start + last), samples)

    mat = product.new_zeros(1).expand(count, product.samples)
    return DenseProduct(form=form, mat=mat, shape=product.shape)


def _side_by_side(use: Mapping[Root, Any]) -> SampleProduct:
    """One product of the columns of several roots, which meet the same."""
    first, *rest = use.values()
    columns = [product.out for product in use.values()] if rest else []
    whole = first.with_factors(torch.cat(columns), first.other, first.is_own) if rest else first
    whole.roots = {root: product.columns for root, product in use.items()}
    return whole  # type: ignore[no-any-return]
