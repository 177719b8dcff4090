"""Gradients of several losses in one pass: a row for each loss, inner products, and mixtures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from reprlib import repr as abridged
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from backpack_core.contract.extension import Extension, FailMode
from backpack_core.contract.rules import LossRule, Normaliser
from backpack_core.errors import ShapeError, UsageError
from backpack_core.record.view import View
from backpack_firstorder.single import in_single
from backpack_products import ColumnPropagator, Columns, SampleProduct
from backpack_products.column_propagator import OutputGradient
from backpack_products.columns import Root
from backpack_products.contractions import flattened
from backpack_products.extensions import as_subsampling
from backpack_products.loss import loss_gradient
from backpack_products.merging import SUM, Refused
from backpack_products.operations import batch_sum, gram, weighted_sum

Weighting = Callable[[Tensor], Tensor]  # weights [R] from a Gram matrix [R, R]


@dataclass(frozen=True)
class LossGradients(ColumnPropagator):
    """The gradient of each extended loss, a column with its own root.

    Attributes:
        subsampling: The samples that take part; ``None`` for all.
    """

    needs_gradient: ClassVar[bool] = False

    subsampling: tuple[int, ...] | None = None

    def start(self, rule: LossRule, view: View) -> Columns:
        """``∂ℓ_n/∂x``, with the factor in front of the loss. Named in the order of calls."""
        assert view.node is not None
        name = str(view.node._sequence_nr())
        return Columns.start(name, loss_gradient(view).unsqueeze(0))

    def merge(self, first: Columns, second: Columns) -> Columns:
        """Also in the order of calls, so that results need not be copied into it."""
        merged: Columns = super().merge(first, second)
        if type(merged) is not Columns:
            return merged
        return Columns({root: merged.blocks[root] for root in sorted(merged.blocks, key=_order)})


class Rows(NamedTuple):
    """What one parameter receives from the losses that reach it.

    Attributes:
        roots: The losses, and how many columns each has.
        value: Rows ``[R, *θ]`` of these losses, or a product of all columns.
    """

    roots: Mapping[Root, int]
    value: Any


class _OfTasks(Extension):
    """An extension of one gradient for each extended loss."""

    is_deferred = True
    needs = (batch_sum,)

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take, of each loss; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.
        """
        super().__init__(LossGradients(as_subsampling(subsampling)), savefield, fail_mode)

    def finish(
        self, values: Mapping[Tensor, Rows], normalisers: Sequence[Normaliser] = ()
    ) -> Mapping[Tensor, Tensor]:
        """Zeros for the losses that do not reach a parameter.

        Args:
            values: What each parameter has.
            normalisers: Not needed.
        """
        places = _places(values.values())
        return {p: self.as_stored(self.padded(rows, places), p) for p, rows in values.items()}

    @abstractmethod
    def padded(self, rows: Rows, places: Mapping[Root, int]) -> Tensor:
        """What one parameter has, with zeros for the other losses."""


class TaskGrad(_OfTasks):
    """The gradient of each loss, if ``backward()`` is called on a sum of several losses.

    Stored in ``grad_task``, shape ``[T, *θ]``: row ``t`` is the gradient of the ``t``-th extended
    loss, in the order in which they were computed, with the factor in front of it. So the rows add
    up to ``.grad``. A row is zero if its loss does not depend on the parameter. All rows come from
    one pass.
    """

    savefield = "grad_task"
    degree = 1
    over_batches = "sum"

    def read(self, product: SampleProduct) -> Rows:
        """The gradients of the losses that reach the parameter."""
        return Rows(product.roots, summed(product))

    def padded(self, rows: Rows, places: Mapping[Root, int]) -> Tensor:
        """Rows ``[T, *θ]``."""
        return _placed(rows.value, [places[root] for root in rows.roots], len(places))


class TaskDotGrad(_OfTasks):
    """Inner products of the gradients of several losses.

    Stored in ``task_dot``, shape ``[T, T]``: ``⟨∇_θ L_s, ∇_θ L_t⟩`` of the rows of
    :class:`TaskGrad`, which are not kept. Summed over parameters, it is the Gram matrix that
    multi-task methods weight losses by (Désidéri, 2012; Quinton and Rey, 2024, arXiv:2406.16232).
    At least in single precision.
    """

    savefield = "task_dot"
    degree = 2
    over_batches = SUM.refused(
        "no batch's matrix has the inner products of gradients of two batches: take TaskGrad, "
        "which combines batches, and multiply its rows."
    )

    def read(self, product: SampleProduct) -> Rows:
        """Inner products of the rows that reach the parameter."""
        rows = flattened(summed(in_single(product)), 1)
        return Rows(product.roots, rows @ rows.T)

    def dtype_for(self, parameter: Tensor) -> torch.dtype:
        """Single precision for half-precision parameters: their squares leave the range."""
        return torch.promote_types(parameter.dtype, torch.float32)

    def padded(self, rows: Rows, places: Mapping[Root, int]) -> Tensor:
        """A Gram matrix ``[T, T]``."""
        return _square(rows, places)


class AggregatedGrad(Extension):
    """A mixture of gradients, with weights that follow from their Gram matrix.

    Stored in ``grad_aggregated``, shape ``[*θ]``: ``Σ_r w_r g_r`` with ``w = weighting(G)`` for the
    Gram matrix ``G = ⟨g_r, g_s⟩`` over all parameters. Rows ``g_r`` are

    - ``rows="samples"``: the individual gradients, as they arrive (``1/N ∇ℓ_n`` for a mean);
    - ``rows="losses"``: the gradients of the extended losses, as :class:`TaskGrad` has them, in the
      order in which they were computed.

    ``weighting`` is a function ``[R, R] → [R]``, or an aggregator of torchjd that weights by the
    Gram matrix (``UPGrad()``, ``MGDA()``, ``AlignedMTL()``, ...). For a sum over samples or losses,
    the value is the aggregator's result for the Jacobian of the losses. The Jacobian, ``[R, P]``,
    is not formed: one pass gives Gram matrices and keeps factors, and makes the mixture from them
    when all parameters have been seen (Quinton and Rey, 2024, arXiv:2406.16232, section 6).
    """

    savefield = "grad_aggregated"
    is_deferred = True
    needs_every_parameter = True
    over_batches = Refused(
        "its weights come from the Gram matrix of one batch: take the gradients of all batches, "
        "and mix them yourself."
    )
    without_degree: ClassVar[str] = (
        "weights may depend on the loss's scale. Scale the loss, and leave out scale=."
    )

    def __init__(
        self,
        weighting: Weighting | Any,
        rows: Literal["samples", "losses"] = "losses",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            weighting: See the class.
            rows: See the class.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: What happens at modules without a rule, see :class:`backpack_core.Extension`.

        Raises:
            UsageError: ``weighting`` is not one, or ``rows`` is unknown.
        """
        if rows not in ("samples", "losses"):
            raise UsageError(f'rows must be "samples" or "losses". Got {rows!r}.')
        samples = as_subsampling(subsampling)
        propagator = LossGradients(samples) if rows == "losses" else OutputGradient(samples)
        super().__init__(propagator, savefield, fail_mode)
        self.weighting = weighting_of(weighting)
        self._of_losses = rows == "losses"
        self.needs = () if self._of_losses else (gram,)

    def read(self, product: SampleProduct) -> Rows:
        """The Gram matrix of this parameter, and the product for the mixture."""
        single = in_single(product)
        if self._of_losses:
            rows = flattened(summed(single), 1)
            return Rows(product.roots, (rows @ rows.T, single))
        return Rows({}, (gram(single)[0, :, 0], single))

    def finish(
        self, values: Mapping[Tensor, Rows], normalisers: Sequence[Normaliser] = ()
    ) -> Mapping[Tensor, Tensor]:
        """Weights from the sum of all Gram matrices, then the mixtures.

        Args:
            values: What each parameter has.
            normalisers: Not needed.

        Raises:
            ShapeError: The weighting did not return one weight for each row.
        """
        if not values:
            return {}
        places = _places(values.values())
        grams = [
            _square(rows._replace(value=rows.value[0]), places) if places else rows.value[0]
            for rows in values.values()
        ]
        whole = reduce(torch.add, [each.to(grams[0].device) for each in grams])
        weights = self.weighting(whole)
        if not isinstance(weights, Tensor) or weights.shape != whole.shape[:1]:
            raise ShapeError(
                f"The weighting must return {len(whole)} weights, one for each row. "
                f"Got {list(weights.shape) if isinstance(weights, Tensor) else abridged(weights)}."
            )
        return {p: self._mixed(p, rows, weights, places) for p, rows in values.items()}

    def _mixed(
        self, parameter: Tensor, rows: Rows, weights: Tensor, places: Mapping[Root, int]
    ) -> Tensor:
        product: SampleProduct = rows.value[1]
        weights = weights.to(product.like)
        if places:
            each = [weights[places[root]].expand(n) for root, n in rows.roots.items()]
            spread = torch.cat(each).unsqueeze(1).expand(product.columns, product.samples)
        else:
            spread = weights.unsqueeze(0)
        mixed = weighted_sum(product, spread.unsqueeze(0).contiguous()).squeeze(0)
        stored: Tensor = self.as_stored(mixed, parameter)
        return stored


def weighting_of(aggregator: Any) -> Weighting:
    """The function ``[R, R] → [R]`` of an aggregator that weights by the Gram matrix.

    Args:
        aggregator: An aggregator of torchjd, or a function ``[R, R] → [R]``.

    Raises:
        UsageError: The argument is not one of these, or needs the Jacobian itself.
    """
    weighting = getattr(aggregator, "gramian_weighting", None)
    if weighting is not None:
        return weighting  # type: ignore[no-any-return]
    is_aggregator = any(kind.__name__ == "Aggregator" for kind in type(aggregator).__mro__)
    if is_aggregator or not callable(aggregator) or isinstance(aggregator, type):
        raise UsageError(
            "weighting must be a function from a Gram matrix [R, R] to weights [R], or an "
            "aggregator of torchjd with a gramian_weighting, such as UPGrad(). Other aggregators "
            f"need the Jacobian: take it from TaskGrad or BatchGrad. Got {abridged(aggregator)}."
        )
    return aggregator  # type: ignore[no-any-return]


def summed(product: SampleProduct) -> Tensor:
    """The gradient of each loss that reaches a parameter, ``[R, *θ]``."""
    rows: Tensor = batch_sum(product)
    counts = [*product.roots.values()]
    if len(rows) == len(counts):
        return rows
    return torch.stack([part.sum(0) for part in rows.split(counts)])


def _order(root: Root) -> int:
    """The order in which losses were computed."""
    return int(root.name)


def _places(values: Iterable[Rows]) -> dict[Root, int]:
    """The row of each loss: in the order in which they were computed."""
    roots = {root: None for rows in values for root in rows.roots}
    return {root: place for place, root in enumerate(sorted(roots, key=_order))}


def _placed(rows: Tensor, places: list[int], count: int) -> Tensor:
    """Rows at their places among zeros."""
    if places == [*range(count)]:
        return rows
    placed = rows.new_zeros(count, *rows.shape[1:])
    placed[places] = rows
    return placed


def _square(rows: Rows, places: Mapping[Root, int]) -> Tensor:
    """A Gram matrix with zeros for the other losses, ``[T, T]``."""
    own = [places[root] for root in rows.roots]
    half = _placed(rows.value, own, len(places))
    return _placed(half.T, own, len(places)).T
