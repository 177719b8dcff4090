"""Kronecker factors by a recursion of batch averages: one matrix instead of columns per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, get_args

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.graph import Node

from backpack_core import LayerRule, LossRule, Propagator, View
from backpack_core.contract.extension import FailMode
from backpack_core.contract.propagator import Reading
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.graph import is_leaf, refuse
from backpack_core.record.call import Call
from backpack_operations.alignment import Crossing
from backpack_operations.bridge import push
from backpack_operations.nodes import is_linear, shape_of
from backpack_products import AffineRule, ElementwiseRule, ParametricRule
from backpack_products.affine import AffineProduct
from backpack_products.contractions import flattened
from backpack_products.derivatives import second_order
from backpack_products.extensions import as_subsampling
from backpack_products.loss import with_hessian
from backpack_products.some_samples import subsample
from backpack_products.tuning import memory_budget
from backpack_secondorder.factors import WeightSharing, kept_input_covariance, parameter_order
from backpack_secondorder.hessian import add
from backpack_secondorder.kfac import MatrixExtension, as_weight_sharing
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.linalg import eigh
from backpack_secondorder.matrix import ParameterOrder
from backpack_secondorder.merging import OF_AVERAGES
from backpack_secondorder.propagators import warn_of_zero
from backpack_secondorder.residual import (
    Residual,
    dense_residual,
    diagonal_residual,
    modified,
    require_one_input,
)


class Average(NamedTuple):
    """``Ḡ`` at a tensor, ``[D, D]``, and the losses that its terms started at."""

    mat: Tensor
    losses: frozenset[Call]


@dataclass(frozen=True)
class BatchAveraged(Propagator):
    """One matrix at every tensor: ``Ḡ_x = 1/N Σ_n J_nᵀ Ḡ_y J_n`` (Botev et al., 2017, eq. 21).

    It starts with the loss Hessian, summed over samples. At a tensor of ``D`` entries per sample it
    has shape ``[D, D]``. The matrices of two branches lack the mixed terms between them and cannot
    be added, so the net must be a chain. Two losses have no mixed terms.

    With ``modify``, ``Σ_n Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²`` is added at every nonlinear module. With
    ``"exact"``, a batch of one sample then gives the Hessian (Chen et al., 2018, arXiv:1802.06502,
    with batch averages).

    Attributes:
        subsampling: The samples that are summed and averaged over; ``None`` for all.
        modify: What is done with the residual: ``None`` leaves it out, as in the generalised
            Gauss-Newton matrix; ``"exact"`` keeps it; ``"clip"`` sets negative eigenvalues of the
            sum to zero, and ``"abs"`` makes them positive.
    """

    subsampling: tuple[int, ...] | None = None
    modify: Residual | None = None

    def start(self, rule: LossRule, view: View) -> Average:
        """The Hessian of the loss, summed over samples."""
        rule = with_hessian(rule, view)
        if self.modify is None:
            warn_of_zero(rule, view)
        return Average(rule.sum_hessian(view), frozenset([view.call]))

    def arrive(self, rule: LayerRule, view: View, waiting: Average | None) -> Average | None:
        """Cast to the dtype of the gradient: under autocast, neighbouring layers differ."""
        average: Average | None = super().arrive(rule, view, waiting)
        return None if average is None else average._replace(mat=average.mat.to(view.dtype))

    def merge(self, first: Average, second: Average) -> Average:
        """The sum, of different losses."""
        if first.losses & second.losses:
            super().merge(first, second)
        return Average(first.mat + second.mat, first.losses | second.losses)

    def propagate(self, rule: LayerRule, view: View, quantity: Average) -> dict[int, Average]:
        """Average ``J_nᵀ Ḡ J_n``; one sample is enough if the Jacobian is constant."""
        averages = self._propagated(rule, view, quantity.mat)
        return {position: quantity._replace(mat=mat) for position, mat in averages.items()}

    def _propagated(self, rule: LayerRule, view: View, quantity: Tensor) -> dict[int, Tensor]:
        if isinstance(rule, ElementwiseRule):
            slope = flattened(rule.derivative(view).expand(view.input_shape), 1)
            average = quantity * (slope.T @ (slope / max(1, len(slope))))
            return {0: _plus(average, self._residual(rule, view))}
        live = [position for position, edge in enumerate(view.call.edges) if edge is not None]
        is_constant = second_order(rule).jacobian_is_constant and view.batch_size
        samples = subsample(view, [0]) if is_constant else view
        result = {}
        for position in live:
            width = view.stored.inputs[position].shape[1:].numel()
            through = partial(_product, rule, position)
            average = _over_samples(samples, quantity, width, through)
            result[position] = _plus(average, self._residual(rule, view))
        return result

    def _residual(self, rule: LayerRule, view: View) -> Tensor | None:
        """``Σ_n Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²``, shape ``[D, D]``; ``None`` for zero."""
        if self.modify is None or second_order(rule).hessian_is_zero:
            return None
        require_one_input(rule, view)
        diagonal = diagonal_residual(rule, view)
        if diagonal is not None:
            return torch.diag(modified(flattened(diagonal, 1).sum(0), self.modify))
        total = flattened(dense_residual(rule, view)(slice(None)), 2).sum(1)
        if self.modify == "exact":
            return total
        values, vectors = eigh((total + total.mT) / 2, view.is_measured)
        return (vectors * modified(values, self.modify)) @ vectors.mT

    def cross(
        self, node: Node, quantities: dict[int, Average], there: Crossing
    ) -> list[tuple[int, Average]]:
        """Multiply with the node's Jacobian from both sides, by calling it under vmap.

        Raises:
            BridgeError: An output has no samples on axis 0, or second derivatives are not known.
        """
        if self.modify is not None and not is_linear(node):
            raise refuse(node, "it is not known to be linear, but the Hessian is asked for")
        crossed: dict[int, Average] = {}
        for number, quantity in quantities.items():
            for position, mat in self._crossed(node, number, quantity.mat, there.batch_size):
                new = quantity._replace(mat=mat)
                crossed[position] = (
                    self.merge(crossed[position], new) if position in crossed else new
                )
        return [*crossed.items()]

    def _crossed(
        self, node: Node, number: int, quantity: Tensor, batch_size: int
    ) -> Iterator[tuple[int, Tensor]]:
        shape = shape_of(node, number)
        if shape[:1] != (batch_size,) or shape[1:].numel() != len(quantity):
            raise refuse(node, "KFRA needs samples on axis 0 of every tensor")
        chosen = range(batch_size) if self.subsampling is None else self.subsampling

        rows = quantity.unsqueeze(1).expand(-1, batch_size, -1)
        for position, half in push(node, {number: rows.reshape(len(rows), *shape)}).items():
            parent = node.next_functions[position][0]
            if parent is None or is_leaf(parent):
                continue
            if half.shape[1] != batch_size:
                raise refuse(node, "KFRA needs samples on axis 0 of every tensor")
            turned = rearrange(flattened(half, 2), "o n i -> i n o")
            columns = turned.reshape(len(turned), *shape)
            full = flattened(push(node, {number: columns})[position], 2)
            yield position, full[:, list(chosen)].mean(1)

    def products(
        self, rule: ParametricRule, view: View, names: Sequence[str], quantity: Average
    ) -> list[AverageReading]:
        """``Ḡ`` at the output, to be read at the parameters."""
        return [AverageReading(rule, view, name, quantity.mat) for name in names]


class AverageReading(Reading):
    """``Ḡ`` at the output of the layer that uses the parameter."""

    def __init__(self, rule: ParametricRule, view: View, name: str, average: Tensor) -> None:
        """Store the average and the call."""
        super().__init__(view.parameter_itself(name).shape)
        self._layer, self._view, self._parameter, self._average = rule, view, name, average

    def factors(self, sharing: WeightSharing) -> KroneckerFactors:
        """``[B, A]`` for a weight, ``[B]`` for a bias, the block for another vector.

        Raises:
            UnsupportedError: The layer declares no structure.
        """
        rule, view, name = self._layer, self._view, self._parameter
        if not isinstance(rule, AffineRule):
            block = _block(rule, view, name, self._average)
            return KroneckerFactors([block], ParameterOrder.of(self))
        average = _affine_form(rule, view, self._average)  # [S, G, O, S, G, O]
        if len(average) == 1:
            # [G, O, G, O]; a copy, since the average itself travels on.
            outer = average[0, :, :, 0].clone(memory_format=torch.contiguous_format)
        elif sharing == "expand" and name != "bias":
            outer = average.diagonal(dim1=0, dim2=3).sum(-1)
        else:
            outer = average.sum((0, 3))
        if name == "bias":
            block = rearrange(outer, "g o h p -> (g o) (h p)")
            return KroneckerFactors([block], ParameterOrder.of(self))
        by_group = rearrange(outer.diagonal(dim1=0, dim2=2), "o p g -> g o p")
        columns = view.stored.outputs[view.index].new_zeros(1, *view.output_shape)
        product = rule.param_product(view, name, columns.to(view.dtype))
        assert isinstance(product, AffineProduct)
        product.placed_as(self)
        inner = kept_input_covariance(product, sharing)
        return KroneckerFactors([by_group.squeeze(0), inner], parameter_order(product))


class KFRA(MatrixExtension):
    """Kronecker-factored curvature with recursive averages over the batch.

    Stored in ``kfra``, factors as in :class:`~backpack_secondorder.kfac.KFAC`. ``B`` comes from the
    recursion of :class:`BatchAveraged`, so no columns are carried. The matrix of the recursion is
    quadratic in the number of activations, which suits fully connected nets. The net must be a
    chain. Botev et al. (2017), sect. 3.4.

    With ``residual="exact"``, second derivatives of nonlinear modules are added, summed over the
    batch. For one sample, the product of the factors is then the block of the Hessian. ``"clip"``
    and ``"abs"`` make the added matrix positive semi-definite (Chen et al., 2018).
    """

    savefield = "kfra"
    degree = 1
    over_batches = OF_AVERAGES.refused(
        "its recursion averages over the samples of one batch: take KFLR or KFAC, which combine "
        "batches."
    )

    def __init__(
        self,
        weight_sharing: WeightSharing = "kfc",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
        residual: Residual | None = None,
    ) -> None:
        """Store the settings.

        Args:
            weight_sharing: ``"kfc"``, ``"expand"`` or ``"reduce"``; see
                :class:`~backpack_secondorder.kfac.KFAC`.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: ``"warning"`` and ``"silent"`` leave out parameters without structure.
            residual: ``None``, ``"exact"``, ``"clip"`` or ``"abs"``; see the class.

        Raises:
            UsageError: The residual is unknown.
        """
        if residual not in (None, *get_args(Residual)):
            raise UsageError(
                f"residual must be None or one of {get_args(Residual)}. Got {residual!r}."
            )
        propagator = BatchAveraged(as_subsampling(subsampling), residual)
        super().__init__(propagator, savefield, fail_mode)
        self.weight_sharing = as_weight_sharing(weight_sharing)

    def read(self, product: AverageReading) -> KroneckerFactors:
        """The factors, from ``Ḡ`` at the call's output."""
        return product.factors(self.weight_sharing)


def _plus(average: Tensor, residual: Tensor | None) -> Tensor:
    return average if residual is None else average + residual


def _over_samples(
    view: View,
    quantity: Tensor,
    width: int,
    through: Callable[[View, Tensor], Tensor],
) -> Tensor:
    """``1/N Σ_n J_nᵀ Ḡ J_n`` for as many samples at a time as the memory budget allows.

    Args:
        view: The samples to average over.
        quantity: ``Ḡ``, shape ``[D, D]``.
        width: Number of columns of ``J``.
        through: ``(part of the call, [V, n, D]) ↦ [V, n, width]``, the product with ``J_nᵀ``.
    """
    samples = view.batch_size
    if not samples:
        return quantity.new_zeros(width, width)
    size = max(1, max(width, len(quantity)) * width * quantity.element_size())
    step = max(1, memory_budget() // size)
    total: Tensor | None = None
    for start in range(0, samples, step):
        part = view if step >= samples else subsample(view, range(samples)[start : start + step])
        rows = quantity.unsqueeze(1).expand(-1, part.batch_size, -1)
        half = through(part, rows)
        product = through(part, half.transpose(0, 2))
        total = add(total, product.squeeze(1) if product.shape[1] == 1 else product.sum(1))
    assert total is not None
    return total if samples == 1 else total / samples


def _product(rule: LayerRule, position: int, view: View, mat: Tensor) -> Tensor:
    product = rule.jac_t_mat_prod(view, mat.reshape(*mat.shape[:2], *view.output_shape[1:]))
    found = product[position]
    assert found is not None
    return flattened(found, 2)


def _block(rule: LayerRule, view: View, name: str, mat: Tensor) -> Tensor:
    """``1/N Σ_n J_θᵀ Ḡ J_θ`` for a vector that the layer is linear in."""
    is_linear = isinstance(rule, ParametricRule) and name in rule.linear_in_params
    if not is_linear or view.parameter(name).dim() != 1:
        raise UnsupportedError(
            f"KFRA needs Kronecker structure, but {type(rule).__name__} of {view.path} declares "
            f"none for {name!r}: derive the rule from AffineRule, freeze the parameter, or leave "
            "KFRA out."
        )

    def through(part: View, rows: Tensor) -> Tensor:
        assert isinstance(rule, ParametricRule)
        columns = rows.reshape(*rows.shape[:2], *view.output_shape[1:])
        return rule.param_jac_t_mat_prod(part, name, columns).flatten(2)

    return _over_samples(view, mat, view.parameter(name).numel(), through)


def _affine_form(rule: AffineRule, view: View, mat: Tensor) -> Tensor:
    """``Ḡ`` with rows and columns as ``[S, G, O]``."""
    if not view.batch_size:  # an empty batch: zero
        sizes = rule.affine_output(view, mat.new_zeros(1, *view.output_shape)).shape[2:]
        return mat.new_zeros(*sizes, *sizes)
    one = subsample(view, [0])

    def rearrange(rows: Tensor) -> Tensor:
        columns = rows.reshape(len(rows), 1, *view.output_shape[1:])
        return rule.affine_output(one, columns).squeeze(1)

    half = rearrange(mat)  # [D, S, G, O]
    sizes = half.shape[1:]
    full = rearrange(half.flatten(1).T)
    return full.reshape(*sizes, *sizes)
