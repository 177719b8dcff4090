"""Sends the Hessian of the loss backwards, from tensor to tensor.

At a call ``y = f(x)`` the Hessian of the loss in ``x`` is ``J_xᵀ H_y J_x + Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²``
(Dangel et al., 2020, BackPACK, eq. 20 and appendix A.3). The second term, the *residual*, is new at
every nonlinear call. Elementwise functions have a diagonal one, which stays a diagonal until
something else than an elementwise function comes along.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from backpack_core import Columns, ElementwiseRule, LayerRule, LossRule, ModuleCall, Propagator
from backpack_core.bridge import cross_columns, is_linear, refuse
from backpack_core.calls import Node
from backpack_core.columns import Root
from backpack_core.errors import UnsupportedError
from backpack_secondorder.hessian import Hessian, Spread, add, unit_vectors

Residual: TypeAlias = Literal["exact", "clip", "abs"]


@dataclass(frozen=True)
class SignedSqrt(Propagator):
    """The Hessian at every tensor, in the cheapest exact form.

    Attributes:
        residual: What is done to residuals (and to the Hessian of the loss): nothing (``"exact"``),
            negative eigenvalues set to zero (``"clip"``) or made positive (``"abs"``), which gives
            the positive-curvature Hessians of Chen et al. (2018, arXiv:1802.06502).
        subsampling: The samples that take part; ``None`` for all.
    """

    residual: Residual = "exact"
    subsampling: tuple[int, ...] | None = None

    def start(self, rule: LossRule, call: ModuleCall) -> Hessian:
        """A square root of the loss Hessian, or an eigendecomposition where there is none."""
        if rule.hessian_is_psd:
            try:
                return Hessian(Columns.start("loss", rule.sqrt_hessian(call)))
            except UnsupportedError:  # negative weights, or a negative factor behind the loss
                pass
        eye = unit_vectors(call.input)
        return Hessian(self._eigen_columns("loss", rule.hessian_mat_prod(call, eye)))

    def propagate(self, rule: LayerRule, call: ModuleCall, quantity: Hessian) -> dict[int, Hessian]:
        """``J_xᵀ H J_x``, and the residual."""
        if isinstance(rule, ElementwiseRule):
            return {0: self._through_elementwise(rule, call, quantity)}
        live = [position for position, edge in enumerate(call.edges) if edge is not None]
        if not rule.hessian_is_zero and len(live) > 1:
            raise UnsupportedError(
                f"{call.path} is nonlinear in {len(live)} inputs at once, and "
                f"{type(rule).__name__} knows no mixed second derivatives: an exact Hessian is "
                "not to be had. Use the generalised Gauss-Newton matrix (DiagGGNExact, GGNMP)."
            )
        inputs = self._pull_back(rule, call, quantity, live)
        if not rule.hessian_is_zero and live:
            (position,) = live
            inputs[position] = inputs[position].merge(self._residual(rule, call))
        return inputs

    def merge(self, first: Hessian, second: Hessian) -> Hessian:
        """Columns root by root; diagonals and blocks come from different roots."""
        return first.merge(second)

    def cross(
        self, node: Node, quantities: dict[int, Hessian], batch_size: int
    ) -> list[tuple[int, Hessian]]:
        """Call a linear node under vmap over the columns.

        Raises:
            BridgeError: The node is not known to be linear.
        """
        if not is_linear(node):
            raise refuse(
                node,
                "it is not known to be linear, and the Hessian needs its second derivative. "
                "(Products of two activations and functional activations are of this kind)",
            )
        arrived = {number: quantity.as_columns() for number, quantity in quantities.items()}
        columns = {nr: q.columns for nr, q in arrived.items() if q.columns is not None}
        branched = frozenset[Root]().union(*(q.branched for q in arrived.values()))
        crossed = cross_columns(node, columns)
        if len(crossed) > 1:
            branched = branched.union(*(c.blocks for c in columns.values()))
        return [(position, Hessian(found, branched=branched)) for position, found in crossed]

    def widen(self, quantity: Hessian, batch_size: int) -> Hessian:
        """Zeros for the samples that were left out."""
        if self.subsampling is None:
            return quantity
        chosen = list(self.subsampling)

        def embed(mat: Tensor) -> Tensor:
            whole = mat.new_zeros(len(mat), batch_size, *mat.shape[2:])
            whole[:, chosen] = mat
            return whole

        return quantity.as_columns().map_columns(embed)

    def narrow(self, quantity: Hessian) -> Hessian:
        """The chosen samples."""
        if self.subsampling is None:
            return quantity
        chosen = list(self.subsampling)
        return quantity.map_columns(lambda mat: mat[:, chosen])

    def move_batch_axis(self, quantity: Hessian, axis: int) -> Hessian:
        """``[V, *, N, *] → [V, N, *, *]``."""
        return quantity.as_columns().map_columns(lambda mat: mat.movedim(axis + 1, 1))

    def adopt(self, value: Hessian, like: Hessian) -> Hessian:
        """Module extensions may send on a :class:`Hessian`.

        Raises:
            UnsupportedError: It is something else.
        """
        if not isinstance(value, Hessian):
            raise UnsupportedError(
                f"A module extension for {self!r} must return a Hessian from backpropagate. Got "
                f"{type(value).__name__}: write a layer rule with second derivatives instead."
            )
        return value

    def _through_elementwise(
        self, rule: ElementwiseRule, call: ModuleCall, quantity: Hessian
    ) -> Hessian:
        """A diagonal stays one, and a block is scaled from both sides."""
        slope = rule.derivative(call)
        result = quantity.scaled(slope)
        if rule.hessian_is_zero:
            return result
        assert call.grad_output is not None
        curvature = self._modify(rule.second_derivative(call) * call.grad_output)
        return replace(result, diagonal=add(result.diagonal, curvature))

    def _pull_back(
        self, rule: LayerRule, call: ModuleCall, quantity: Hessian, live: list[int]
    ) -> dict[int, Hessian]:
        """``J_xᵀ H J_x`` for all inputs; what goes to several of them has to be columns."""
        if len(live) != 1:
            quantity = quantity.as_columns()
            assert quantity.columns is not None
            roots = frozenset(quantity.columns.blocks)
            branched = quantity.branched | roots if len(live) > 1 else quantity.branched
            products = rule.jac_t_mat_prod(call, quantity.columns.mat)
            return {
                i: Hessian(quantity.columns.split(p), branched=branched)
                for i, p in enumerate(products)
                if p is not None
            }
        (position,) = live

        def push(mat: Tensor) -> Tensor:
            product = rule.jac_t_mat_prod(call, mat)[position]
            assert product is not None
            return product

        quantity = _cheapest(quantity, call, position)
        if quantity.block is not None:
            half = push(quantity.block)  # [D_out, N, *in]
            turned = half.flatten(2).transpose(0, 2)  # [D_in, N, D_out]
            block = push(turned.reshape(*turned.shape[:2], *call.output_shape[1:]))
            return {position: replace(quantity, block=block).map_columns(push)}
        spread = None
        if quantity.diagonal is not None and rule.jacobian_is_constant:
            spread = _spread(rule, call, quantity.diagonal, position)
            quantity = replace(quantity, diagonal=None)
        return {position: replace(quantity.as_columns().map_columns(push), spread=spread)}

    def _residual(self, rule: LayerRule, call: ModuleCall) -> Hessian:
        """``Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²``."""
        grad = call.grad_output
        assert grad is not None
        if rule.hessian_is_diagonal:
            ones = torch.ones_like(call.input).unsqueeze(0)
            curvature = rule.second_derivative_mat_prod(call, grad, ones).squeeze(0)
            return Hessian(diagonal=self._modify(curvature))
        mat = rule.second_derivative_mat_prod(call, grad, unit_vectors(call.input))
        if self.residual == "exact":
            return Hessian(block=mat)
        return Hessian(self._eigen_columns("residual", mat))

    def _eigen_columns(self, name: str, block: Tensor) -> Columns:
        """``[D, N, *]`` of symmetric matrices as eigenvectors times roots of eigenvalues."""
        size, samples = block.shape[:2]
        matrices = block.reshape(size, samples, size).transpose(0, 1)
        values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
        values = self._modify(values)
        mat = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1)
        return Columns.start(name, mat.reshape(block.shape), values.sign().T)

    def _modify(self, values: Tensor) -> Tensor:
        if self.residual == "exact":
            return values
        return values.clamp(min=0) if self.residual == "clip" else values.abs()


def _cheapest(quantity: Hessian, call: ModuleCall, position: int) -> Hessian:
    """Collect in a block, if pushing one from both sides takes fewer columns than there are."""
    size_out = call.output_shape[1:].numel()
    size_in = call.inputs[position].shape[1:].numel()
    if quantity.block is not None or quantity.width > size_out + size_in:
        return quantity.as_block()
    return quantity


def _spread(rule: LayerRule, call: ModuleCall, diagonal: Tensor, position: int) -> Spread:
    """``Jᵀ diag(d) J``, where one Jacobian serves all samples."""
    product = rule.jac_t_mat_prod(call.subsample([0]), unit_vectors(diagonal[:1]))[position]
    assert product is not None
    scale = product.new_ones(len(diagonal), *product.shape[2:])
    return Spread(product, diagonal.flatten(1).T, scale)
