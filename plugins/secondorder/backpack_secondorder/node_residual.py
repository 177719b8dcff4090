"""The residual of an operation between modules, in the cheapest form of a ``Hessian``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backpack_core.graph import refuse
from backpack_operations import nodes
from backpack_operations.alignment import Crossing
from backpack_operations.nodes import NodeOutput
from backpack_products import Columns
from backpack_products.columns import ApartColumns, Root, most_often
from backpack_products.contractions import slices
from backpack_products.tuning import column_budget, memory_budget
from backpack_secondorder.hessian import Hessian
from backpack_secondorder.node_derivative import (
    SecondDerivative,
    has_samples_in_front,
    is_output,
)
from backpack_secondorder.residual import unit_vectors
from backpack_secondorder.signed import unit_columns

Part: TypeAlias = list[tuple[int, Hessian]]  # by position in ``node.next_functions``


class NodeResidual:
    """``R`` at a node, for each sample.

    If it is not known where samples lie, the whole batch is treated as one sample. That is exact,
    but takes as many columns as the tensor has entries.
    """

    def __init__(
        self, derivative: SecondDerivative, there: Crossing, subsampling: tuple[int, ...] | None
    ) -> None:
        """Choose the form.

        Args:
            derivative: ``R`` as a linear map.
            there: Where samples lie.
            subsampling: The samples that take part; ``None`` for all.
        """
        self._derivative, self._batch_size = derivative, there.batch_size
        self._subsampling, self._apart_at = subsampling, there.apart
        self._places = _involved(derivative)
        # Equal numbers of rows and samples prove nothing: picked rows may be those of one sample.
        is_owned = there.owned or any(isinstance(n, Tensor) for n in there.behind.values())
        is_other = is_owned or self._are_elsewhere(there)
        self._samples = self._batch_size if not is_other and self._is_known() else 1

    def _are_elsewhere(self, there: Crossing) -> bool:
        """Whether an operand is known to have no samples in front, whatever its length is."""
        is_looked_for = there.positions or there.apart_outputs or there.others  # else all have
        places = self._derivative.positions
        at = {position for place in self._places for position in places[place]}
        return bool(is_looked_for) and not at <= there.behind.keys()

    def _is_known(self) -> bool:
        """Whether samples are in front in all operands, or in one if rows meet only their like."""
        positions, node = self._derivative.positions, self._derivative.node
        known = [has_samples_in_front(place, self._batch_size) for place in self._places]
        rows = nodes.shape_of(node, 0)[:1]
        meet = (
            nodes.shape_of(*place)[:1] == rows and nodes.keeps_rows(node, 0, positions[place][0])
            for place in self._places
        )
        return all(known) or (any(known) and all(meet))

    @cached_property
    def whole(self) -> Hessian | None:
        """The residual as a diagonal or a block; ``None`` if it must be columns."""
        place, *others = self._places
        is_whole = is_output(place, self._batch_size) and self._subsampling is None
        if others or not is_whole or self._samples != self._batch_size or self._apart_at:
            return None
        if self._is_elementwise:
            return Hessian(diagonal=self._diagonal)
        shape = nodes.shape_of(*place)
        if shape[1:].numel() * self._derivative.like(place).nbytes > memory_budget():
            return None
        eye = unit_vectors(self._derivative.like(place).expand(shape))
        return Hessian(block=self._derivative.product({place: eye}).get(place))

    @property
    def position(self) -> int:
        """The position of the first operand in ``node.next_functions``."""
        return self._derivative.positions[self._places[0]][0]

    @property
    def size(self) -> int:
        """The number of columns."""
        each = 1 if self._is_elementwise else 2
        return each * sum(self._width(place) for place in self._started)

    def parts(self, size: int | None) -> Iterator[Part]:
        """The residual as columns, at most ``size`` at a time; ``None`` for all at once."""
        for place in self._started:
            width = self._width(place)
            for some in slices(width, width if size is None else max(1, size // 2)):
                yield self._columns(place, some)

    @property
    def most(self) -> int:
        """The number of columns that may be formed at once."""
        entries = sum(nodes.shape_of(*place).numel() for place in self._places)
        like = self._derivative.like(self._places[0])
        return max(2, column_budget(like.device.type) // max(1, entries * like.element_size()))

    @cached_property
    def _is_elementwise(self) -> bool:
        node = self._derivative.node
        is_same = nodes.shape_of(*self._places[0]) == nodes.shape_of(node, 0)
        is_known = nodes.operation_of(node) in nodes.ELEMENTWISE
        return len(self._places) == 1 and is_same and is_known

    @cached_property
    def _started(self) -> list[NodeOutput]:
        """Operands at which columns start: the block of ``R`` in all others is zero."""
        operation, several = nodes.operation_of(self._derivative.node), len(self._places) > 1
        if several and operation in nodes.FACTORS:
            return [min(self._places, key=self._width)]
        if several and operation in nodes.QUOTIENTS:
            return [place for place in self._places if self._derivative.positions[place] != [0]]
        return self._places

    def _width(self, place: NodeOutput) -> int:
        """How many entries a sample has at an operand."""
        return nodes.shape_of(*place).numel() // max(1, self._samples)

    @cached_property
    def _diagonal(self) -> Tensor:
        """``R`` of an elementwise operation: shape ``[*shape]``."""
        (place,) = self._places
        like = self._derivative.like(place)
        product = self._derivative.product({place: torch.ones_like(like).unsqueeze(0)})
        return product[place].squeeze(0) if place in product else torch.zeros_like(like)

    def _columns(self, place: NodeOutput, some: slice) -> Part:
        """Columns that start at some entries of one operand; they have a part at every operand."""
        if self._is_elementwise:
            mat, signs = unit_columns(self._apart(self._diagonal), some)
            return self._sent({place: mat}, signs)
        # Σ_d e_d h_dᵀ + h_d e_dᵀ = 1/2 Σ_d (a e_d + h_d/a)(·)ᵀ - (a e_d - h_d/a)(·)ᵀ, with
        # a² = ‖h_d‖: both halves have the same size, so the least cancels.
        unit = unit_vectors(self._apart(self._derivative.like(place)), some)  # [d, N, D]
        products = self._derivative.product({place: unit.reshape(-1, *nodes.shape_of(*place))})
        # Terms that couple an operand to a parameter are not in a diagonal block.
        rows = {p: products[p].reshape(*unit.shape[:2], -1) for p in self._places if p in products}
        for other in self._started:  # this loop meets pairs of started operands twice
            if other in rows:
                rows[other] = rows[other] / 2
        squares = [mat.square().sum(2, keepdim=True) for mat in rows.values()]
        scale = torch.stack([torch.zeros_like(unit[..., :1]), *squares]).sum(0).sqrt()
        scale = scale.clamp_min(torch.finfo(unit.dtype).tiny).sqrt()
        mats = {}
        for p in self._places:
            zero = unit.new_zeros(*unit.shape[:2], self._width(p))
            first = unit * scale if p == place else zero
            second = rows[p] / scale if p in rows else zero
            mats[p] = torch.cat([first + second, first - second]) / 2**0.5
        signs = unit.new_ones(2 * len(unit), unit.shape[1])
        signs[len(unit) :] = -1
        return self._sent(mats, signs)

    def _apart(self, tensor: Tensor) -> Tensor:
        """``[N, D]``."""
        return tensor.reshape(self._samples, tensor.numel() // max(1, self._samples))

    def _sent(self, mats: dict[NodeOutput, Tensor], signs: Tensor) -> Part:
        """Columns ``[V, N, D]`` at operands as columns in the shapes of the operands.

        They are of all samples, as often as each is chosen; readings take the chosen ones.
        """
        signs, turns = signs.expand(-1, self._batch_size), 1
        if self._subsampling is not None:
            chosen = [n % self._batch_size for n in self._subsampling]
            signs, turns = signs[:, chosen], most_often(chosen)
        root = Root("residual", signs)
        branched = frozenset([root] if len(mats) > 1 else [])
        part = []
        for place, mat in mats.items():
            shape = nodes.shape_of(*place)
            whole = mat.reshape(-1, *shape).repeat(turns, *[1] * len(shape))
            position = self._derivative.positions[place][0]
            columns = Columns({root: whole})
            if position in self._apart_at:  # of one sample, see ``couples_nothing``
                columns = ApartColumns({root: whole.unsqueeze(1)})
            part.append((position, Hessian(columns, branched=branched)))
        return part


def _involved(derivative: SecondDerivative) -> list[NodeOutput]:
    """Operands that the operation is not known to be linear in."""
    factors = nodes.FACTORS.get(nodes.operation_of(derivative.node))
    places = derivative.positions.items()
    return [place for place, at in places if factors is None or not {*at}.isdisjoint(factors)]


def add_residual(
    node: Node, crossed: Part, there: Crossing, subsampling: tuple[int, ...] | None
) -> Part:
    """The Hessian behind a node: what crossed the node, plus the node's residual.

    If the residual does not fit into memory, it is sent on in chunks at once.

    Args:
        node: The node, not yet executed.
        crossed: The quantity behind the node.
        there: Gradients at the node, and where samples lie.
        subsampling: The samples that take part; ``None`` for all.

    Raises:
        BridgeError: The node is a Python ``autograd.Function``, or has complex numbers.
    """
    if nodes.is_linear(node) or not there.batch_size:
        return crossed
    derivative = None if nodes.is_function(node) else SecondDerivative(node, there.grads)
    if derivative is None or derivative.is_complex:
        raise refuse(
            node,
            "it is not known to be linear, and the Hessian needs its second derivative",
            "For Python functions and complex numbers that derivative is not known: move the "
            "operation into a module with a layer rule, or use DiagHMP, which takes a product for "
            "every entry.",
        )
    if derivative.is_zero or not derivative.positions:
        return crossed
    residual, size = NodeResidual(derivative, there, subsampling), there.size()
    if residual.whole is not None:
        return [*crossed, (residual.position, residual.whole)]
    formed = max((hessian.formed for _, hessian in crossed), default=0)
    if size is None or formed + residual.size <= min(size, residual.most):
        return [*crossed, *(sent for part in residual.parts(None) for sent in part)]
    for part in residual.parts(min(size, residual.most)):
        there.carry(part)
    return crossed
