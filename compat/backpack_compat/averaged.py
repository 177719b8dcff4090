"""Kronecker factors of the Hessian by averages over the batch: what the incumbent's ``HBP`` offers.

Imports the second-order plugin, whose recursion for the generalised Gauss-Newton matrix it extends.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backpack_core import LayerRule, View
from backpack_core._torch import Node
from backpack_core.graph.nodes import is_linear, refuse
from backpack_secondorder.kfra import KFRA, BatchAveraged
from backpack_secondorder.residual import (
    dense_residual,
    diagonal_residual,
    live_inputs,
    require_one_input,
)


@dataclass(frozen=True)
class AveragedHessian(BatchAveraged):
    """``H̄_x = 1/N Σ_n J_nᵀ H̄_y J_n + Σ_n Σ_o ∂ℓ/∂y_no ∂²f_o/∂x_n²``, one matrix at every tensor.

    Botev et al. (2017), eq. 21, with the curvature of the layers themselves. For a single sample it
    is the Hessian at the tensor, and the blocks of layers that are linear in their parameters are
    exact. Chains of modules only.
    """

    def propagate(self, rule: LayerRule, view: View, quantity: Tensor) -> dict[int, Tensor]:
        """The recursion.

        Raises:
            UnsupportedError: Second derivatives of the layer are not known.
        """
        require_one_input(rule, view)
        sent = super().propagate(rule, view, quantity)
        live = live_inputs(view)
        if rule.hessian_is_zero or not live:
            return sent
        return {live[0]: sent[live[0]] + _summed_residual(rule, view)}

    def cross(
        self, node: Node, quantities: dict[int, Tensor], batch_size: int
    ) -> list[tuple[int, Tensor]]:
        """Call the node under vmap, from both sides.

        Raises:
            BridgeError: The node is not known to be linear, or mixes axes.
        """
        if not is_linear(node):
            raise refuse(node, "it is not known to be linear, and the Hessian needs that")
        return super().cross(node, quantities, batch_size)


class AveragedHessianFactors(KFRA):
    """As ``KFRA``, for the Hessian; not defined where a layer is nonlinear in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.propagator = AveragedHessian()


def _summed_residual(rule: LayerRule, view: View) -> Tensor:
    """``Σ_n`` of the residuals. Shape ``[D, D]``."""
    diagonal = diagonal_residual(rule, view)
    if diagonal is not None:
        return diagonal.flatten(1).sum(0).diag()
    rows = dense_residual(rule, view)(slice(0, view.input_shape[1:].numel()))
    return rows.sum(1).flatten(1)
