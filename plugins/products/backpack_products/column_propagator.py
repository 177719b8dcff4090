"""Propagators that send columns backwards, by transposed Jacobians (vector-Jacobian products).

A derived class says how the columns start at a loss; everything else is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.bases import base
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.rules import LayerRule, LossRule, expect
from backpack_core.errors import ShapeError, UnsupportedError
from backpack_core.record.view import View
from backpack_products.apart import owned_by, put_together
from backpack_products.columns import (
    ApartColumns,
    Columns,
    InRuns,
    OwnedColumns,
    Root,
    most_often,
    split_positions,
)
from backpack_products.parametric import ParametricRule
from backpack_products.product import SampleProduct
from backpack_products.some_samples import counted_from_zero


@base
class ColumnPropagator(Propagator):
    """A propagator whose quantity is :class:`~backpack_products.Columns`, pushed by ``Jᵀ``.

    To write:
        ``start(rule, view)``: columns ``[V, N, *in]`` at the input of a loss.
    """

    keeps_apart = True
    sheds_everywhere = False

    def arrive(self, rule: LayerRule, view: View, waiting: Columns | None) -> Columns | None:
        """The arrived columns in the gradient's dtype: under autocast, layers differ in dtype."""
        if rule.is_loss:
            waiting = super().arrive(rule, view, waiting)
            mats = waiting.blocks.values() if isinstance(waiting, Columns) else [type(waiting)]
            for mat in mats:
                what = "start must return Columns.start(name, mat): it gave"
                expect(view, self, what, mat, view.input_shape)
        return None if waiting is None else self._columns(waiting).to(view.dtype)

    def _columns(self, quantity: Any) -> Columns:
        """The quantity, if it has the right type; a method of an author may have returned it."""
        if isinstance(quantity, Columns):
            return quantity
        raise ShapeError(
            f"The quantity of {type(self).__name__} is {quantity!r:.80}: arrive, propagate, merge "
            "and residual of a ColumnPropagator give Columns."
        )

    def nothing(self, view: View) -> Columns | None:
        """A column of zeros ``[1, N, *out]``."""
        assert view.grad_output is not None
        return Columns.start("nothing", torch.zeros_like(view.grad_output).unsqueeze(0))

    def propagate(self, rule: LayerRule, view: View, quantity: Columns) -> dict[int, Columns]:
        """Columns at the inputs, by one transposed Jacobian product for all columns."""
        if isinstance(quantity, InRuns) and quantity.is_in_front:  # a rule does not mix rows
            mats = enumerate(rule.jac_t_mat_prod(view, quantity.plain.flat))
            runs = {i: quantity.with_rows(mat) for i, mat in mats if mat is not None}
            if None not in runs.values():
                return {i: columns for i, columns in runs.items() if columns is not None}
        products = enumerate(rule.jac_t_mat_prod(view, quantity.flat))
        return {i: quantity.split(mat) for i, mat in products if mat is not None}

    def products(
        self, rule: Any, view: View, names: Sequence[str], quantity: Columns
    ) -> list[SampleProduct]:
        """The products at some parameters, for the columns of all roots.

        Raises:
            UnsupportedError: The rule covers parameters, but has no products.
        """
        if not isinstance(rule, ParametricRule):
            raise UnsupportedError(
                f"{type(rule).__name__} covers {', '.join(names)} of {view.path}, but has no "
                "products there: derive it from backpack_products.ParametricRule, or leave the "
                "extension out."
            )
        columns = self._columns(quantity)
        if isinstance(columns, ApartColumns):
            products = rule.apart_products(view, names, columns)
        else:
            products = rule.param_products(view, names, columns.mat)
        roots = quantity.sizes
        for product in products:
            product.roots = roots
        return products

    def merge(self, first: Columns, second: Columns) -> Columns:
        """The sum, root by root."""
        return self._columns(first).merge(self._columns(second))

    def widen(self, quantity: Columns, size: int, view: View | None = None) -> Columns:
        """Columns of the whole batch, with zeros for samples that were left out."""
        return quantity.widened(*self._chosen(view, size), size)

    def narrow(self, quantity: Columns, view: View | None = None) -> Columns:
        """The columns of the chosen samples."""
        columns = self._columns(quantity)
        return columns.chosen(*self._chosen(view, columns.mat.shape[1]))

    def _chosen(self, view: View | None, size: int) -> tuple[Sequence[int] | None, int]:
        """The chosen entries of axis 0, and how often the most frequent sample is chosen.

        If that sample has no entries here, the entries do not show how often.
        """
        if self.subsampling is None:
            return None, 1
        samples = size if view is None else view.samples
        turns = most_often(counted_from_zero(self.subsampling, samples))
        return (self.subsampling if view is None else view.indices), turns

    def cross(
        self, node: Node, quantities: dict[int, Columns], there: Any
    ) -> list[tuple[int, Columns]]:
        """Columns behind a node, by the object that the operations library hands over."""
        for quantity in quantities.values():
            self._columns(quantity)
        crossed: list[tuple[int, Columns]] = there.push(node, quantities)
        return crossed

    def take_apart(self, quantity: Columns, positions: int | Tensor) -> Columns:
        """Split columns by sample, with zeros at the entries of all others."""
        if isinstance(quantity, ApartColumns):
            return quantity
        owned = owned_by(positions, quantity.mat.shape[1], quantity.mat.device)
        chosen = self.subsampling if isinstance(positions, Tensor) else None
        if chosen is None:
            return OwnedColumns(quantity, owned)
        if self.travels and len({*chosen}) < len(
            chosen
        ):  # a repeated sample has other columns each time
            return OwnedColumns(quantity, owned).formed().chosen(*self._chosen(None, len(owned)))
        return OwnedColumns(quantity, owned[counted_from_zero(chosen, len(owned))])

    def put_together(self, quantity: Columns, positions: int | Tensor) -> Columns:
        """Join the columns of all samples; raises if a sample reaches the entries of another."""
        if isinstance(quantity, InRuns) and quantity.are_side_by_side(positions):
            return quantity.plain
        return Columns({r: put_together(mat, positions) for r, mat in quantity.blocks.items()})

    def split_positions(self, quantity: Columns, owners: Tensor | None, samples: int) -> Columns:
        """Give several entries of one sample columns of their own."""
        return split_positions(quantity, owners, samples)

    def map(self, quantity: Columns, function: Callable[[Tensor], Tensor]) -> Columns:
        """Apply a function to all columns at once."""
        return quantity.map(function)

    def shed(
        self,
        rule: LayerRule | None,
        view: View,
        quantity: Columns,
        size: int,
        is_rooted: bool = False,
    ) -> tuple[Columns, Iterable[Columns]]:
        """Cut columns into chunks at a loss; elsewhere, columns of other branches may be added."""
        return quantity.cut(size) if rule is not None and rule.is_loss else (quantity, ())


@base
@dataclass(frozen=True)
class OutputGradient(ColumnPropagator):
    """The gradient at the output, as a single column, which first-order extensions read."""

    travels = False
    _ROOT: ClassVar[Root] = Root("gradient")
    subsampling: tuple[int, ...] | None = None

    def start(self, rule: LossRule, view: View) -> Columns:
        """Raise an error: autograd carries this quantity, so it does not start at a loss."""
        raise UnsupportedError("The output gradient is autograd's own quantity.")

    def arrive(self, rule: LayerRule, view: View, waiting: Columns | None) -> Columns:
        """Autograd's gradient, or, at a tensor without samples, the columns kept apart."""
        if waiting is not None:
            return waiting.to(view.dtype)
        assert view.grad_output is not None
        return Columns({self._ROOT: view.grad_output.unsqueeze(0)})

    def supply(
        self, quantities: dict[int, Columns], grads: Sequence[Tensor | None]
    ) -> dict[int, Columns]:
        """Add autograd's gradients at a node, where columns begin to be kept apart."""
        gradients = {
            nr: Columns({self._ROOT: gradient.unsqueeze(0)})
            for nr, gradient in enumerate(grads)
            if gradient is not None
        }
        return {**gradients, **quantities}

    def cross(
        self, node: Node, quantities: dict[int, Columns], there: Any
    ) -> list[tuple[int, Columns]]:
        """Columns behind a node, only at tensors without samples: elsewhere autograd has them."""
        if self.subsampling is not None:  # a repeated sample has a column each time
            chosen = counted_from_zero(self.subsampling, there.batch_size)
            turns = most_often(chosen)
            quantities = {
                nr: c
                if isinstance(c, ApartColumns)
                else Columns({self._ROOT: c.mat.expand(turns, *c.mat.shape[1:])})
                for nr, c in quantities.items()
            }
        crossed: list[tuple[int, Columns]] = there.push(node, quantities, keeps_all=False)
        return crossed
