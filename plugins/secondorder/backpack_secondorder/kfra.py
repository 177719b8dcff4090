"""Kronecker factors by a recursion over averages: one matrix instead of columns for each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.graph import Node

from backpack_core import (
    AffineRule,
    ElementwiseRule,
    LayerRule,
    LossRule,
    ParametricRule,
    Propagator,
    SecondOrderExtension,
    View,
    memory_budget,
)
from backpack_core.contract.extension import FailMode, as_subsampling
from backpack_core.contract.product import AffineProduct, Reading
from backpack_core.errors import UnsupportedError
from backpack_core.graph.bridge import push
from backpack_core.graph.nodes import is_leaf, refuse, shape_of
from backpack_secondorder.factors import WeightSharing, kept_input_covariance, parameter_order
from backpack_secondorder.hessian import add
from backpack_secondorder.kfac import as_weight_sharing
from backpack_secondorder.kronecker import KroneckerFactors, ParameterOrder


@dataclass(frozen=True)
class BatchAveraged(Propagator):
    """One matrix at every tensor: ``Ḡ_x = 1/N Σ_n J_nᵀ Ḡ_y J_n`` (Botev et al., 2017, eq. 21).

    It starts with the loss Hessian, summed over samples. At a tensor of ``D`` entries per sample it
    has shape ``[D, D]``. Over branches it cannot be added, so the net must be a chain.

    Attributes:
        subsampling: The samples that are summed and averaged over; ``None`` for all.
    """

    subsampling: tuple[int, ...] | None = None

    def start(self, rule: LossRule, view: View) -> Tensor:
        """The Hessian of the loss, summed over samples."""
        return rule.sum_hessian(view)

    def propagate(self, rule: LayerRule, view: View, quantity: Tensor) -> dict[int, Tensor]:
        """Average ``J_nᵀ Ḡ J_n`` over samples; one is enough where the Jacobian is constant."""
        if isinstance(rule, ElementwiseRule):
            slope = rule.derivative(view).flatten(1)
            return {0: quantity * (slope.T @ (slope / len(slope)))}
        live = [position for position, edge in enumerate(view.call.edges) if edge is not None]
        samples = view.subsample([0]) if rule.jacobian_is_constant else view
        result = {}
        for position in live:
            width = view.stored.inputs[position].shape[1:].numel()
            through = partial(_product, rule, position)
            result[position] = _over_samples(samples, quantity, width, through)
        return result

    def cross(
        self, node: Node, quantities: dict[int, Tensor], batch_size: int
    ) -> list[tuple[int, Tensor]]:
        """Call the node under vmap, from both sides.

        Raises:
            BridgeError: The node has several outputs, or an output without samples on axis 0.
        """
        ((number, quantity),) = quantities.items()
        shape = shape_of(node, number)
        if shape[:1] != (batch_size,) or shape[1:].numel() != len(quantity):
            raise refuse(node, "KFRA needs samples on axis 0 of every tensor")
        chosen = range(batch_size) if self.subsampling is None else self.subsampling

        rows = quantity.unsqueeze(1).expand(-1, batch_size, -1)
        result = []
        for position, half in push(node, {number: rows.reshape(-1, *shape)}).items():
            parent = node.next_functions[position][0]
            if parent is None or is_leaf(parent):
                continue
            if half.shape[1] != batch_size:
                raise refuse(node, "KFRA needs samples on axis 0 of every tensor")
            turned = rearrange(half.flatten(2), "o n i -> i n o")
            full = push(node, {number: turned.reshape(-1, *shape)})[position].flatten(2)
            result.append((position, full[:, list(chosen)].mean(1)))
        return result

    def product(
        self, rule: ParametricRule, view: View, name: str, quantity: Tensor
    ) -> AverageReading:
        """``Ḡ`` at the output, to be read at the parameter."""
        return AverageReading(rule, view, name, quantity)


class AverageReading(Reading):
    """``Ḡ`` at the output of the layer that uses the parameter."""

    def __init__(self, rule: ParametricRule, view: View, name: str, average: Tensor) -> None:
        """Store all."""
        super().__init__(view.parameter_itself(name).shape)
        self._layer, self._view, self._parameter, self._average = rule, view, name, average

    def factors(self, sharing: WeightSharing) -> KroneckerFactors:
        """``[B, A]`` for a weight, ``[B]`` for a bias, the block for another vector.

        Raises:
            UnsupportedError: The layer declares no structure.
        """
        rule, view, name, shape = self._layer, self._view, self._parameter, self.shape
        if not isinstance(rule, AffineRule):
            return KroneckerFactors(
                [_block(rule, view, name, self._average)], ParameterOrder(shape)
            )
        average = _affine_form(rule, view, self._average)  # [S, G, O, S, G, O]
        if len(average) == 1:
            # [G, O, G, O], and no view of what travels on.
            outer = average[0, :, :, 0].clone(memory_format=torch.contiguous_format)
        elif sharing == "expand" and name != "bias":
            outer = average.diagonal(dim1=0, dim2=3).sum(-1)
        else:
            outer = average.sum((0, 3))
        if name == "bias":
            block = rearrange(outer, "g o h p -> (g o) (h p)")
            return KroneckerFactors([block], ParameterOrder(shape))
        by_group = rearrange(outer.diagonal(dim1=0, dim2=2), "o p g -> g o p")
        columns = view.stored.outputs[view.index].new_zeros(1, *view.output_shape)
        product = rule.param_product(view, name, columns.to(view.dtype))
        assert isinstance(product, AffineProduct)
        product.kept, product.name = self.kept, name
        inner = kept_input_covariance(product, sharing)
        return KroneckerFactors([by_group.squeeze(0), inner], parameter_order(product))


class KFRA(SecondOrderExtension):
    """Kronecker-factored curvature with recursive averages over the batch.

    Stored in ``kfra``, factors as in :class:`~backpack_secondorder.kfac.KFAC`. ``B`` comes from the
    recursion of :class:`BatchAveraged`, so that no columns are carried; its size is quadratic in
    the activations, which suits fully connected nets. Chains only. Botev et al. (2017), sect. 3.4.
    """

    savefield = "kfra"

    def __init__(
        self,
        weight_sharing: WeightSharing = "kfc",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            weight_sharing: ``"kfc"``, ``"expand"`` or ``"reduce"``; see
                :class:`~backpack_secondorder.kfac.KFAC`.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: ``"warning"`` and ``"silent"`` leave out parameters without structure.
        """
        super().__init__(BatchAveraged(as_subsampling(subsampling)), savefield, fail_mode)
        self.weight_sharing = as_weight_sharing(weight_sharing)

    def read(self, product: AverageReading) -> KroneckerFactors:
        """The factors, from ``Ḡ`` at the call's output."""
        return product.factors(self.weight_sharing)


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
    size = max(width, len(quantity)) * width * quantity.element_size()
    step = max(1, memory_budget() // size)
    total: Tensor | None = None
    for start in range(0, samples, step):
        part = view if step >= samples else view.subsample(range(samples)[start : start + step])
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
    return found.flatten(2)


def _block(rule: LayerRule, view: View, name: str, mat: Tensor) -> Tensor:
    """``1/N Σ_n J_θᵀ Ḡ J_θ`` of a vector in which the layer is linear."""
    is_linear = isinstance(rule, ParametricRule) and name in rule.linear_in_params
    if not is_linear or view.parameter(name).dim() != 1:
        raise UnsupportedError(
            f"KFRA needs Kronecker structure, and {type(rule).__name__} of {view.path} declares "
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
    one = view.subsample([0])

    def rearrange(rows: Tensor) -> Tensor:
        columns = rows.reshape(len(rows), 1, *view.output_shape[1:])
        return rule.affine_output(one, columns).squeeze(1)

    half = rearrange(mat)  # [D, S, G, O]
    sizes = half.shape[1:]
    full = rearrange(half.flatten(1).T)
    return full.reshape(*sizes, *sizes)
