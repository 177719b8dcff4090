"""Products in factors at operands without samples, such as ``self.weight`` in ``F.linear``.

Autograd saved the other factor of the operation. So the columns ``[V, N, *]`` at the operand need
not be formed: they are a product of two factors, as at a module. The product keeps its form on the
way to the parameter as long as only the order of its entries changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from itertools import accumulate, chain
from reprlib import repr as abridged
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.errors import PluginError, ShapeError
from backpack_core.plugins.registry import registry
from backpack_core.record.storage import storage
from backpack_operations import nodes
from backpack_operations._torch import metadata_of
from backpack_operations.bridge import push
from backpack_products.affine import AffineProduct
from backpack_products.columns import ApartColumns, Columns, Root, require_one_form
from backpack_products.computing import only_computes
from backpack_products.factors import FactorProduct
from backpack_products.open_functions import preferred_version
from backpack_products.operations import dense
from backpack_products.product import IS_TABLE, DenseProduct, SampleProduct, regrouped, sum_of
from backpack_products.scale import TableProduct
from backpack_products.values import is_same_memory


class Operand(NamedTuple):
    """An operand of an operation that is the same for all samples.

    Attributes:
        node: The node of the operation, not executed yet, with the tensors that it saved.
        position: The position of the operand in ``node.next_functions``.
        shape: Its shape.
        is_apart: Whether the columns at the output are kept apart by sample, ``[V, N, *]``; if not,
            they have the samples on axis 0 of the output.
    """

    node: Any
    position: int
    shape: torch.Size
    is_apart: bool


Maker = Callable[[Operand, Tensor], SampleProduct | None]
_MAKERS: dict[str, dict[str, Maker]] = {}  # by name of the operation, and by package


class FactoredColumns(ApartColumns):
    """Columns kept apart by sample, as products ``[V, N, *]`` that are formed only if needed."""

    def __init__(self, products: Mapping[Root, Sequence[SampleProduct]]) -> None:
        """Store the products of each root; their sum is the value."""
        self.products = products

    @cached_property
    def blocks(self) -> Mapping[Root, Tensor]:  # type: ignore[override]
        """The formed columns of each root."""
        terms = self.products.items()
        return {root: reduce(torch.add, map(dense, some)) for root, some in terms}

    @property
    def sizes(self) -> dict[Root, int]:
        """How many columns each root has."""
        return {root: some[0].columns for root, some in self.products.items()}

    def to(self, dtype: torch.dtype) -> Columns:
        """The columns in a dtype; formed, unless the products have it already."""
        dtypes = {product.like.dtype for some in self.products.values() for product in some}
        return self if dtypes == {dtype} else super().to(dtype)

    def merge(self, other: Columns) -> Columns:
        """The sum with other columns, as the products of both."""
        if isinstance(other, FactoredColumns):
            added = other.products
        else:
            require_one_form(other, ApartColumns(other.blocks))
            added = {root: [DenseProduct(block)] for root, block in other.blocks.items()}
        roots = {**self.products, **added}
        return FactoredColumns({r: [*self.products.get(r, ()), *added.get(r, ())] for r in roots})

    def product(self) -> SampleProduct:
        """One product ``[V, N, *]`` with the columns of all roots, one root after the other."""
        # Products of several roots with the same other factor are one product of all columns.
        uses: dict[Any, dict[Root, SampleProduct]] = {}
        for root, some in self.products.items():
            for n, product in enumerate(some):
                other = getattr(product, "other", None)
                use = uses.setdefault((root, n) if other is None else id(other), {})
                if root in use:
                    use = uses.setdefault((root, n), {})
                use[root] = product
        return sum_of([_side_by_side(use) for use in uses.values()])

    def through(self, node: Node) -> FactoredColumns | None:
        """The products behind a node that reorders entries or selects rows; ``None`` at others."""
        kinds = {type(product) for some in self.products.values() for product in some}
        operation = nodes.operation_of(node)
        maker: Any = None
        are_affine = all(issubclass(kind, AffineProduct) for kind in kinds)
        if are_affine and operation in nodes.VIEWS | nodes.TURNS | {"Clone"}:
            maker = _turned
        elif are_affine and operation == "ToCopy":
            maker = _cast
        elif kinds == {TableProduct} and operation in nodes.VIEWS | {"Clone", "Slice", "Select"}:
            maker = _with_rows
        if maker is None:
            return None
        ((child, number),) = node.next_functions
        assert child is not None
        turned = partial(maker, node=node, shape=nodes.shape_of(child, number))
        products = {root: [*map(turned, some)] for root, some in self.products.items()}
        return None if None in chain(*products.values()) else FactoredColumns(products)


def _with_rows(product: TableProduct, node: Node, shape: torch.Size) -> TableProduct | None:
    """The product of a table behind a node that selected some of its rows."""
    return product.behind(lambda mats: push(node, {0: mats})[0], shape)


def _cast(product: Any, node: Any, shape: torch.Size) -> AffineProduct | None:
    """An affine product in the precision of what autocast, for example, has converted."""
    dtype, other = metadata_of(*node.next_functions[0]).dtype, product.inp
    if not dtype.is_floating_point or not (other is None or isinstance(other, Tensor)):
        return None
    inp = None if other is None else other.to(dtype)
    return product.with_factors(product.out.to(dtype), inp, product.is_own)  # type: ignore[no-any-return]


def _turned(product: Any, node: Any, shape: torch.Size) -> AffineProduct:
    """An affine product behind a node that reorders the entries of the parameter."""
    count, device = len(product.sizes), product.like.device
    blank = torch.empty(product.sizes, dtype=torch.int8, device=device)
    behind = node(product.to_parameter(blank))
    if is_same_memory(behind, blank):  # a view: its strides tell the order
        is_usual, strides = behind.is_contiguous(), behind.stride()
        order = None if is_usual else partial(_viewed, count=count, shape=shape, strides=strides)
    else:
        numbers = torch.arange(shape.numel(), device=device).reshape(product.sizes)
        picks = node(product.to_parameter(numbers)).flatten()
        order = partial(_picked, count=count, shape=shape, picks=picks)
    return AffineProduct(product.out, product.inp, shape, order, product.is_own)


def _viewed(mat: Tensor, count: int, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """A view ``[*lead, *shape]`` of the last ``count`` axes, with the strides of a parameter."""
    whole, lead = mat.contiguous(), mat.shape[:-count]
    return whole.as_strided((*lead, *shape), (*whole.stride()[: len(lead)], *strides))


def _picked(mat: Tensor, count: int, shape: torch.Size, picks: Tensor) -> Tensor:
    """A copy ``[*lead, *shape]`` of the last ``count`` axes, with the entries in another order."""
    ordered = mat.flatten(-count)[..., picks.to(mat.device)]
    return ordered.reshape(*mat.shape[:-count], *shape)


def products_at(*operations: str) -> Callable[[Maker], Maker]:
    """Register a function that makes products at the operands of some operations.

    The function gets an :class:`Operand` and columns ``[V, R, *out]``. It returns a product
    ``[V, R, *θ]``, or ``None`` if it knows no form. ``R`` counts the entries of axis 0, which are
    treated as samples. If columns are kept apart, ``R`` may be any other axis that is summed over.

    Args:
        operations: Names of operations: that of ``AddmmBackward0`` is ``Addmm``.

    Raises:
        PluginError: A name is something else, such as the function.
    """
    if not operations or not all(isinstance(name, str) for name in operations):
        raise PluginError(
            f"products_at takes names of operations: @products_at('Addmm'). Got {operations!r:.80}."
        )

    def register(make: Maker) -> Maker:
        for name in operations:
            _MAKERS.setdefault(name, {})[make.__module__.partition(".")[0]] = make
        registry.forget()  # passes that repeat what another function made
        return make

    return register


def makers_that_may_do_more() -> list[Maker]:
    """The functions whose package does not say that it only computes."""
    return [make for of in _MAKERS.values() for make in of.values() if not only_computes(make)]


def operand_product(
    node: Node, position: int, columns: Columns, samples: int, is_table: bool = False
) -> SampleProduct | None:
    """The product at an operand that is the same for all samples.

    Args:
        node: An autograd node that autograd has not executed yet, with one output.
        position: The position of the operand in ``node.next_functions``.
        columns: At the node's output, with samples in front, or kept apart.
        samples: ``N``.
        is_table: Whether the output is computed from parameters alone.

    Returns:
        A product ``[V, N, *operand]``; ``None`` if no form is known.
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
        make = preferred_version(_MAKERS[name], f"products_at/{name}")
        product = make(operand, mat)
    if product is None:
        return None
    _expect(make, product, operand, mat)
    lasting: SampleProduct = product.lasting()  # it is read only when autograd gets to the operand
    if (lasting.columns, lasting.samples) == (count, samples):
        return lasting
    return regrouped(lasting, count, samples, {IS_TABLE: is_table})


def _expect(make: Maker, found: object, operand: Operand, mat: Tensor) -> None:
    """Raise unless a plugin's function returned a product for the columns that it was given."""
    expected = [len(mat), "R" if operand.is_apart else mat.shape[1], *operand.shape]
    if isinstance(found, SampleProduct):
        rows = "R" if operand.is_apart else found.samples
        if [found.columns, rows, *found.shape] == expected:
            return
    raise ShapeError(
        f"{make.__module__}.{make.__qualname__} returned {abridged(found)} for an operand of "
        f"{nodes.operation_of(operand.node)}, expected a SampleProduct {expected}, or None."
    )


def by_root(product: SampleProduct, sizes: Mapping[Root, int]) -> dict[Root, list[SampleProduct]]:
    """Split a product by root; all parts share the other factor."""
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
    """One product of the columns of several roots that have the same other factor."""
    first, *rest = use.values()
    columns = [product.out for product in use.values()] if rest else []
    whole = first.with_factors(torch.cat(columns), first.other, first.is_own) if rest else first
    whole.roots = {root: product.columns for root, product in use.items()}
    return whole  # type: ignore[no-any-return]
