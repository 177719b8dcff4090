"""The recursion of the Hessian as columns with signs, from tensor to tensor.

At a call ``y = f(x)`` the Hessian of the loss in ``x`` is ``J_xᵀ H_y J_x + Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²``
(Dangel et al., 2020, BackPACK, eq. 20 and appendix A.3). The second term, the *residual*, is new at
every nonlinear call, and at every nonlinear operation between calls (``node_residual``). That of an
elementwise function is diagonal, and stays diagonal through further elementwise functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.graph import Node

from backpack_core import LayerRule, LossRule, Propagator, View
from backpack_core.errors import UnsupportedError
from backpack_operations import nodes
from backpack_operations.alignment import Crossing
from backpack_products import Columns, ElementwiseRule, ParametricRule
from backpack_products.columns import ApartColumns, Root, most_often, split_positions
from backpack_products.contractions import flattened, slices
from backpack_products.derivatives import second_order
from backpack_products.loss import with_hessian
from backpack_products.some_samples import subsample
from backpack_products.tuning import memory_budget
from backpack_secondorder.hessian import Factored, Hessian
from backpack_secondorder.hessian_reading import HessianReading, Use
from backpack_secondorder.node_residual import add_residual
from backpack_secondorder.propagators import LossSqrt
from backpack_secondorder.residual import (
    dense_residual,
    diagonal_residual,
    eigen_columns,
    live_inputs,
    require_one_input,
    unit_vectors,
)
from backpack_secondorder.without_samples import (
    Missing,
    coupled,
    couples_nothing,
    leaves_behind,
    needs_samples,
)


@dataclass(frozen=True)
class SignedSqrt(Propagator):
    """The Hessian at every tensor, in the cheapest exact form.

    Attributes:
        subsampling: The samples that take part; ``None`` for all.
        leaves_out: Whether a part that cannot be computed without samples is missing only for the
            parameters behind it (:class:`Missing`). Otherwise the pass raises an error for all.
    """

    keeps_apart = True
    subsampling: tuple[int, ...] | None = None
    leaves_out: bool = False

    @property
    def _of_columns(self) -> LossSqrt:
        """The propagator of plain columns, for operations on columns of any kind."""
        return LossSqrt(subsampling=self.subsampling)

    def start(self, rule: LossRule, view: View) -> Hessian:
        """A square root of the loss Hessian, or an eigendecomposition if it has no real root."""
        rule = with_hessian(rule, view)
        if rule.hessian_is_zero:
            return Hessian(Columns.start("loss", torch.zeros_like(view.input).unsqueeze(0)))
        if rule.hessian_is_psd:
            try:
                return Hessian(Columns.start("loss", *rule.signed_sqrt_hessian(view)))
            except UnsupportedError:  # negative weights, or negative factors after the loss
                pass
        eye = unit_vectors(view.input)
        hessian = rule.hessian_mat_prod(view, eye)
        return Hessian(eigen_columns("loss", hessian, view.is_measured))

    def arrive(self, rule: LayerRule, view: View, waiting: Hessian | None) -> Hessian | None:
        """Cast to the dtype of the gradient: under autocast, neighbouring layers differ."""
        hessian: Hessian | None = super().arrive(rule, view, waiting)
        return None if hessian is None else hessian.with_rows_formed().to(view.dtype)

    def propagate(self, rule: LayerRule, view: View, quantity: Hessian) -> dict[int, Hessian]:
        """``J_xᵀ H J_x``; for several inputs only as columns, which keep the mixed terms."""
        is_apart = quantity.is_apart
        if is_apart and view.positions:
            raise needs_samples(view, "an input of it has none")
        if isinstance(rule, ElementwiseRule) and not is_apart:
            return {0: quantity.scaled(rule.derivative(view))}
        live = live_inputs(view)
        if len(live) == 1 and view.positions == 1:
            return {live[0]: self._pull_back(rule, view, quantity, live[0])}
        if len(live) > 1:
            require_one_input(rule, view)
        quantity = self.rooted(quantity)
        if self.leaves_out and not (second_order(rule).hessian_is_zero or _has_samples(view)):
            error = needs_samples(view, "it is nonlinear")
            quantity = Missing.of(error, leaves_behind(view)).beside(quantity)
        if quantity.columns is None:  # a quantity must arrive there
            return {position: Hessian() for position in live}
        products = rule.jac_t_mat_prod(view, quantity.columns.flat)
        return {
            i: Hessian(quantity.columns.split(p), branched=quantity.branched)
            for i, p in enumerate(products)
            if p is not None
        }

    def residual(self, rule: LayerRule, view: View) -> dict[int, Hessian]:
        """``Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²`` of a nonlinear call."""
        residuals = self._residual_of_rows(rule, view)
        if view.positions == 1:
            return residuals
        return {place: self._of_samples(view, quantity) for place, quantity in residuals.items()}

    def _of_samples(self, view: View, quantity: Hessian) -> Hessian:
        """The Hessian of each row as that of each sample: rows of one get separate columns.

        If rows are in no order, all rows are there, as often as a sample is chosen.
        """
        owners, chosen = view.owners, self.subsampling
        samples = view.samples if chosen is None or not view.positions else len(chosen)
        if owners is None:
            owners = torch.arange(samples, device="cpu").repeat_interleave(view.positions)
        columns = self.split_positions(quantity.as_columns(), owners, samples).columns
        if columns is not None and chosen is not None and not view.positions:
            columns = columns.repeated([n % samples for n in chosen])
        return self.rooted(Hessian(columns))

    def _residual_of_rows(self, rule: LayerRule, view: View) -> dict[int, Hessian]:
        """The residual with a sample for each entry of axis 0."""
        live = live_inputs(view)
        if second_order(rule).hessian_is_zero or not live:
            return {}
        if self.leaves_out and not _has_samples(view):
            return {}  # noted where the Hessian went through
        require_one_input(rule, view)
        if not _has_samples(view):
            raise needs_samples(view, "it is nonlinear")
        diagonal = diagonal_residual(rule, view)
        if diagonal is not None:
            return {live[0]: Hessian(diagonal=diagonal)}
        rows, size = dense_residual(rule, view), view.input_shape[1:].numel()
        if size * view.input.nbytes > memory_budget():
            return {live[0]: Hessian(rows=(size, rows))}
        return {live[0]: Hessian(block=rows(slice(0, size)))}

    def products(
        self, rule: ParametricRule, view: View, names: Sequence[str], quantity: Hessian
    ) -> list[HessianReading]:
        """The Hessian, to be read at the parameters."""
        count = view.samples if self.subsampling is None else len(self.subsampling)
        count = view.batch_size if view.positions == 1 else count
        return [HessianReading([Use(rule, view, name, quantity, count)]) for name in names]

    def merge(self, first: Hessian, second: Hessian) -> Hessian:
        """Add columns root by root; diagonals and blocks are from different roots, so they add."""
        return first.merge(second)

    def rooted(self, quantity: Hessian) -> Hessian:
        """The Hessian as columns, marked as branched, so that they stay columns."""
        formed = quantity.as_columns()
        roots = () if formed.columns is None else formed.columns.blocks
        return replace(formed, branched=quantity.branched.union(roots))

    def shed(
        self,
        rule: LayerRule | None,
        view: View,
        quantity: Hessian,
        size: int,
        is_rooted: bool = False,
    ) -> tuple[Hessian, Iterable[Hessian]]:
        """Split off chunks: at a loss of its columns, elsewhere of residuals that are too large."""
        if rule is not None and rule.is_loss:
            if quantity.columns is None or quantity.formed <= size:
                return quantity, ()
            last, others = quantity.columns.cut(size)
            return Hessian(last), map(Hessian, others)
        if rule is None and quantity.formed > size:
            assert quantity.columns is not None  # samples have several rows
            chosen = None if view.positions else self.subsampling
            turns = 1 if chosen is None else most_often([n % view.samples for n in chosen])
            last, others = quantity.columns.cut(size, turns)
            return self.rooted(Hessian(last)), (self.rooted(Hessian(other)) for other in others)
        if rule is None:
            stays = quantity.rows is None and not (is_rooted and quantity.unformed > size)
        elif quantity.formed + quantity.unformed <= size:
            stays = True
        else:
            stays = not is_rooted and self._forms_nothing(rule, view, quantity)
        if stays:
            return quantity, ()
        kept = replace(quantity, diagonal=None, factored=None, block=None, rows=None)
        return kept, quantity.chunks(size)

    @staticmethod
    def _forms_nothing(rule: LayerRule, view: View, quantity: Hessian) -> bool:
        """Whether the quantity goes through a call without becoming columns."""
        if isinstance(rule, ElementwiseRule):
            return True
        live = live_inputs(view)
        if len(live) != 1:
            return not live
        if _prefers_block(quantity, view, live[0]):
            return True
        only_diagonal = quantity.factored is None and quantity.block is None
        return only_diagonal and _may_factor(quantity.diagonal, rule, view, live[0])

    def cross(
        self, node: Node, quantities: dict[int, Hessian], there: Crossing
    ) -> list[tuple[int, Hessian]]:
        """Call the node under vmap over the columns, and add ``Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²``, once."""
        arrived = {number: quantity.as_columns() for number, quantity in quantities.items()}
        columns = {nr: q.columns for nr, q in arrived.items() if q.columns is not None}
        branched = frozenset[Root]().union(*(q.branched for q in arrived.values()))
        is_apart = any(quantity.is_apart for quantity in arrived.values())
        root: Root = Root("nothing")
        try:
            is_whole = bool(there.batch_size) and couples_nothing(node, there, is_apart)
        except UnsupportedError as error:
            if not self.leaves_out:
                raise
            is_whole, root = True, Missing.of(error, coupled(node))
        if is_whole:
            there = there._replace(grads=())
        crossed = self._of_columns.cross(node, columns, there) if columns else []
        if len(crossed) > 1:
            branched = branched.union(*(c.blocks for c in columns.values()))
        sent = [(position, Hessian(found, branched=branched)) for position, found in crossed]
        if not columns or isinstance(root, Missing):  # a quantity must arrive at calls
            sent += [
                (i, self._nothing(node, i, there, root))
                for i, (child, _) in enumerate(node.next_functions)
                if child
            ]
        return add_residual(node, sent, there, self.subsampling) if there.grads else sent

    def _nothing(self, node: Node, position: int, there: Crossing, root: Root) -> Hessian:
        """A zero Hessian at an operand; as columns, if the root marks missing parts."""
        is_apart, count = position in there.apart, 0
        if isinstance(root, Missing):
            count = most_often([n % there.batch_size for n in self.subsampling or (0,)])
        if not (is_apart or count):
            return Hessian()
        child, number = node.next_functions[position]
        assert child is not None
        lead = (count, there.batch_size) if is_apart else (count,)
        zeros = nodes.zeros_at(child, number, *lead)
        kind = ApartColumns if is_apart else Columns
        return Hessian(kind({root: zeros}), branched=frozenset([root] if count else []))

    def take_apart(self, quantity: Hessian, positions: int | Tensor) -> Hessian:
        """Take the Hessian apart by sample, as columns."""
        formed = quantity.as_columns()
        if formed.columns is None:
            return formed
        return replace(formed, columns=self._of_columns.take_apart(formed.columns, positions))

    def put_together(self, quantity: Hessian, positions: int | Tensor) -> Hessian:
        """Join the columns of all samples; an error if a sample reaches the entries of another."""
        if quantity.columns is None:
            return quantity
        return replace(quantity, columns=self._of_columns.put_together(quantity.columns, positions))

    def split_positions(self, quantity: Hessian, owners: Tensor | None, samples: int) -> Hessian:
        """Give several positions of one sample separate columns."""
        assert quantity.columns is not None
        return Hessian(split_positions(quantity.columns, owners, samples))

    def widen(self, quantity: Hessian, size: int, view: View | None = None) -> Hessian:
        """The Hessian for the whole batch, with zeros for samples that were left out."""
        if self.subsampling is None or quantity.as_columns().columns is None:
            return quantity
        formed = quantity.as_columns()
        assert formed.columns is not None
        return replace(formed, columns=self._of_columns.widen(formed.columns, size, view))

    def narrow(self, quantity: Hessian, view: View | None = None) -> Hessian:
        """Keep only the chosen samples."""
        if self.subsampling is None or quantity.columns is None:
            return quantity
        return replace(quantity, columns=self._of_columns.narrow(quantity.columns, view))

    def map(self, quantity: Hessian, function: Callable[[Tensor], Tensor]) -> Hessian:
        """Apply the function to everything as columns."""
        return quantity.as_columns().map_columns(function)

    def _pull_back(self, rule: LayerRule, view: View, quantity: Hessian, position: int) -> Hessian:
        """``J_xᵀ H J_x`` for a call with a single live input."""

        def push(mat: Tensor) -> Tensor:
            return _pushed(rule, view, mat, position)

        if _prefers_block(quantity, view, position):
            quantity = quantity.as_block()
            if quantity.block is not None:  # otherwise all columns have branched
                half = flattened(push(quantity.block), 2)  # [D_out, N, D_in]
                turned = rearrange(half, "o n i -> i n o")
                block = push(turned.reshape(*turned.shape[:2], *view.output_shape[1:]))
                return replace(quantity, block=block).map_columns(push)
        factored = None
        if quantity.diagonal is not None and _may_factor(quantity.diagonal, rule, view, position):
            factored = _factored(rule, view, quantity.diagonal, position)
            quantity = replace(quantity, diagonal=None)
        return replace(quantity.as_columns().map_columns(push), factored=factored)


def _prefers_block(quantity: Hessian, view: View, position: int) -> bool:
    """Whether to send the block from both sides: it takes fewer columns, and fits into memory."""
    size_out = view.output_shape[1:].numel()
    size_in = view.stored.inputs[position].shape[1:].numel()
    entries = max(size_out, size_in) * size_in * view.batch_size
    itemsize = view.stored.outputs[view.index].element_size()
    if quantity.rows is not None or entries * itemsize > memory_budget():
        return False
    width = quantity.formed + quantity.unformed
    width -= 0 if quantity.block is None else len(quantity.block)
    return quantity.block is not None or width > size_out + size_in


def _has_samples(view: View) -> bool:
    """Whether the sample of each row of a call is known."""
    return bool(view.positions) or view.owners is not None


def _pushed(rule: LayerRule, view: View, mat: Tensor, position: int) -> Tensor:
    """``J_xᵀ mat``; zero for an input that gives the output only its shape."""
    product = rule.jac_t_mat_prod(view, mat)[position]
    if product is not None:
        return product
    return mat.new_zeros(*mat.shape[:2], *view.stored.inputs[position].shape[1:])


def _may_factor(diagonal: Tensor | None, rule: LayerRule, view: View, position: int) -> bool:
    """Whether all samples have the same Jacobian, and it fits into memory."""
    if diagonal is None or not second_order(rule).jacobian_is_constant or not view.batch_size:
        return False
    tensor = view.stored.inputs[position]
    entries = diagonal.shape[1:].numel() * tensor.shape[1:].numel()
    return entries * tensor.element_size() <= memory_budget()


def _factored(rule: LayerRule, view: View, diagonal: Tensor, position: int) -> Factored:
    """``Jᵀ diag(d) J``, if all samples have the same Jacobian."""
    one, first, size = subsample(view, [0]), diagonal[:1], diagonal.shape[1:].numel()
    step = max(1, memory_budget() // max(1, first.nbytes))
    rows = []
    for some in slices(size, step):
        rows.append(_pushed(rule, one, unit_vectors(first, some), position))
    jacobian = torch.cat(rows)
    scale = jacobian.new_ones(len(diagonal), *jacobian.shape[2:])
    return Factored(jacobian, flattened(diagonal, 1).T, scale)
