"""Readings of the Hessian's diagonal at a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack_core import Reading, View
from backpack_core.errors import UnsupportedError
from backpack_core.graph import name_of
from backpack_interplay.leaves import nonlinear_between
from backpack_operations.bare import BareRule
from backpack_operations.order import behind
from backpack_products import AffineRule, Columns, ParametricRule
from backpack_products.affine import AffineProduct
from backpack_products.columns import ApartColumns, Root
from backpack_products.product import ComputedProduct, SampleProduct, sum_of
from backpack_products.tuning import column_budget
from backpack_secondorder.hessian import Hessian, add
from backpack_secondorder.position_pairs import diagonal, sample_diagonals
from backpack_secondorder.signed import diagonal_square_sum, signed_square_sum
from backpack_secondorder.without_samples import Missing


class Use(NamedTuple):
    """One use of a parameter: a layer that is linear in it, with the Hessian at its output.

    Attributes:
        samples: How many samples take part.
        computed: If the layer's parameter was computed from a leaf: the leaf, and a function that
            carries columns back to it.
        formed: The columns of each root at the leaf, if the computation has lost its graph.
    """

    rule: ParametricRule
    view: View
    name: str
    hessian: Hessian
    samples: int
    computed: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None
    formed: Mapping[Root, SampleProduct] | None = None

    def lasting(self) -> Use:
        """The use in a form that outlives the graph of the pass."""
        if self.computed is None:
            return self
        hessian = self.hessian.as_columns()
        formed = {root: self.product(columns).lasting() for root, columns in hessian.by_root()}
        return self._replace(hessian=hessian, formed=formed)

    def product(self, columns: Columns) -> SampleProduct:
        """``J_θᵀ mat`` for the columns of one root."""
        if self.formed is not None:
            (root,) = columns.sizes
            return self.formed[root]
        if isinstance(columns, ApartColumns):
            product = self.rule.apart_product(self.view, self.name, columns)
        else:
            product = self.rule.param_product(self.view, self.name, columns.mat)
        if self.view.positions > 1:
            product = product.of_samples(self.samples, self.view.call_cache)
        product.roots = columns.sizes
        return product if self.computed is None else ComputedProduct(product, *self.computed)


class HessianReading(Reading):
    """``H`` at the outputs of all layers that use the parameter."""

    def __init__(self, uses: Sequence[Use]) -> None:
        """Store the uses."""
        first = uses[0]
        known = first.computed or (first.view.parameter_itself(first.name),)
        super().__init__(known[0].shape)
        self._uses = tuple(uses)

    def lasting(self) -> HessianReading:
        """The reading with columns carried to the leaves already."""
        return HessianReading([use.lasting() for use in self._uses]).placed_as(self)

    def at_leaf(
        self, source: Tensor, leaf: Tensor, pull: Callable[[Tensor], Tensor]
    ) -> HessianReading:
        """The reading at a leaf, if the computation is linear in it.

        Raises:
            UnsupportedError: It is not linear: its second derivative belongs to the Hessian.
        """
        for node in nonlinear_between(source, leaf):
            raise UnsupportedError(
                f"The parameter {self.name!r} of {self.path} is computed from others by the "
                f"operation {name_of(node)!r}, which is not known to be linear. Its second "
                "derivative belongs to the Hessian, but is not carried. Use DiagHMP, or the "
                "generalised Gauss-Newton matrix (DiagGGNExact), or remove the parametrization."
            )
        return HessianReading([use._replace(computed=(leaf, pull)) for use in self._uses])

    def join(self, others: Sequence[HessianReading]) -> HessianReading:
        """The reading of all uses; contributions of one root are added before they are squared.

        Raises:
            UnsupportedError: One use lies behind another on a path, so the net is not linear in
                the parameter, although each layer is.
        """
        uses = [use for reading in (self, *others) for use in reading._uses]
        for use in uses:
            if _leads_to_another(use, uses):
                raise UnsupportedError(
                    f"The parameter {use.name!r} of {use.view.path} is used again on the way to "
                    "its own use there, so the loss has mixed second derivatives of both uses, "
                    "which are not carried: untie the uses, or use HMP, or the generalised "
                    "Gauss-Newton matrix (DiagGGNExact)."
                )
        return HessianReading(uses)

    def diagonal(self, per_sample: bool = False) -> Tensor:
        """``Σ_n diag(J_θᵀ H_n J_θ)``, or each summand.

        Args:
            per_sample: Leave out the sum over samples.

        Returns:
            Shape ``[*θ]``, or ``[N, *θ]`` for each sample.

        Raises:
            UnsupportedError: A layer is not known to be linear in the parameter, or a part of the
                Hessian is missing.
        """
        for rule, view, name, hessian, *_ in self._uses:
            require_linear(rule, view, name)
            for root in () if hessian.columns is None else hessian.columns.sizes:
                number = id(view.parameter_itself(name))
                if isinstance(root, Missing) and number in root.parameters:
                    raise UnsupportedError(root.why)
        total: Tensor | None = None
        for uses in _in_parts(self._uses):
            for root, products in _by_root(uses).items():
                total = add(total, _squares(root, products, per_sample))
            for use in uses:
                if use.hessian.diagonal is not None:
                    column = Columns.start("diagonal", use.hessian.diagonal.unsqueeze(0))
                    product = use.product(column)
                    assert isinstance(product, AffineProduct)
                    total = add(total, diagonal_square_sum(product, per_sample))
        if total is None:
            view = self._uses[0].view
            lead = (self._uses[0].samples,) if per_sample else ()
            total = torch.zeros(*lead, *self.shape, dtype=view.dtype, device=view.device)
        return total


def _leads_to_another(use: Use, uses: Sequence[Use]) -> bool:
    """Whether a layer's input depends on the parameter already.

    If a function uses the parameter, this is checked where columns cross the function.
    """
    if isinstance(use.rule, BareRule):
        return False
    own: set[Node | None] = {u.view.node for u in uses if not isinstance(u.rule, BareRule)}
    bare = {u.view.node for u in uses if isinstance(u.rule, BareRule)}
    before: list[Node] = [edge.node for edge in use.view.call.edges if edge is not None]
    return not (
        own.isdisjoint(behind([use.view.node])) and bare.isdisjoint({*before} | behind(before))
    )


def _by_root(uses: Sequence[Use]) -> dict[Root, list[SampleProduct]]:
    products: dict[Root, list[SampleProduct]] = {}
    for use in uses:
        for root, columns in use.hessian.by_root():
            products.setdefault(root, []).append(use.product(columns))
    return products


def _squares(root: Root, products: Sequence[SampleProduct], per_sample: bool) -> Tensor:
    product = sum_of(products) if len(products) > 1 else products[0]
    if root.signs is not None:
        return signed_square_sum(product, root.signs, per_sample)
    return sample_diagonals(product) if per_sample else diagonal(product)


def _in_parts(uses: Sequence[Use]) -> Iterator[list[Use]]:
    """Split the Hessians of all uses into parts whose diagonals add up.

    Columns that share a root stay together. The other forms become columns, as many at a time as
    the memory budget allows.
    """
    halves = [_halves(use) for use in uses]
    yield [use._replace(hessian=first) for use, (first, _) in zip(uses, halves, strict=True)]
    for use, (_, rest) in zip(uses, halves, strict=True):
        output = use.view.stored.outputs[use.view.index]
        size = column_budget(output.device.type) // max(1, output.nbytes)
        for part in rest.chunks(max(1, size)):
            yield [use._replace(hessian=part)]


def _halves(use: Use) -> tuple[Hessian, Hessian]:
    """Split a Hessian into a part that is read as a diagonal, and a part that becomes columns.

    An affine layer reads a diagonal ``d`` unchanged. If it shares no positions, the diagonal of
    every form but the columns is enough.
    """
    rule, view, _, hessian, *_ = use
    kept = Hessian(hessian.columns, branched=hessian.branched)
    if use.computed or not (hessian.unformed and isinstance(rule, AffineRule)):
        return kept, hessian
    column = torch.empty(1, *view.output_shape, device=view.device)
    if rule.affine_output(view, column).shape[2] == 1:
        return replace(kept, diagonal=hessian.own_diagonal), Hessian()
    return replace(kept, diagonal=hessian.diagonal), replace(hessian, diagonal=None)


def require_linear(rule: object, view: View, name: str) -> None:
    """Raise an error unless the layer is known to be linear in the parameter.

    Raises:
        UnsupportedError: ``∂²f/∂θ²`` is not known to vanish.
    """
    if isinstance(rule, BareRule):
        return  # the operations on the way have been checked
    if not (isinstance(rule, ParametricRule) and name in rule.linear_in_params):
        raise UnsupportedError(
            f"The Hessian in {name!r} of {view.path} needs the layer's second derivative in that "
            f"parameter, which {type(rule).__name__} does not declare to vanish: write a layer "
            "rule that names it in linear_in_params, freeze the parameter, or use DiagHMP, which "
            "takes a product for every entry, or the generalised Gauss-Newton matrix "
            "(DiagGGNExact, GGNMP)."
        )
