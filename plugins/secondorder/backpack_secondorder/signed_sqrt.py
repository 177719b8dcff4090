"""The Hessian at every tensor: columns with signs, a diagonal, and a dense block.

At a call ``y = f(x)`` the Hessian of the loss in ``x`` is ``J_xᵀ H_y J_x + Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²``
(Dangel et al., 2020, BackPACK, eq. 20 and appendix A.3). The second term, the *residual*, is new at
every nonlinear call. Elementwise functions have a diagonal one, which stays a diagonal until something
else than an elementwise function comes along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from backpack_core import Columns, ElementwiseRule, LayerRule, LossRule, ModuleCall, Propagator
from backpack_core.bridge import cross_columns, is_linear, refuse
from backpack_core.calls import Node
from backpack_core.columns import Root
from backpack_core.errors import UnsupportedError
from backpack_core.ops.signed import unit_columns

Residual: TypeAlias = Literal["exact", "clip", "abs"]


@dataclass(frozen=True, eq=False)
class Hessian:
    """``Σ_v σ_v S_v S_vᵀ + diag(d) + H`` for each sample, at one tensor.

    What comes from one root over several branches has to be added before it is squared. Only columns
    can do that. So the diagonal and the block hold what has come, and will go, over a single path.

    Attributes:
        columns: ``S``, with signs in the roots; ``None`` for none.
        diagonal: ``d``, shape ``[N, *]``; ``None`` for zero.
        block: ``H``, as its rows ``[D, N, *]``; ``None`` for zero.
        branched: Roots of columns that went separate ways somewhere.
    """

    columns: Columns | None = None
    diagonal: Tensor | None = None
    block: Tensor | None = None
    branched: frozenset[Root] = frozenset()

    def signed_columns(self) -> tuple[Tensor, Tensor] | None:
        """``S`` and ``σ``: ``[V, N, *]`` and ``[V, N]``; ``None`` for none."""
        if self.columns is None:
            return None
        mat, signs = self.columns.mat, self.columns.signs
        return mat, mat.new_ones(mat.shape[:2]) if signs is None else signs

    def matmul(self, mat: Tensor) -> Tensor:
        """The product with ``[V, N, *]``."""
        result = torch.zeros_like(mat)
        signed = self.signed_columns()
        if signed is not None:
            columns = signed[0].flatten(2)
            inner = torch.einsum("cnd,vnd->cnv", columns, mat.flatten(2))
            inner = inner * signed[1].unsqueeze(-1)
            result = result + torch.einsum("cnd,cnv->vnd", columns, inner).reshape(mat.shape)
        if self.diagonal is not None:
            result = result + mat * self.diagonal
        if self.block is not None:
            product = torch.einsum("dnk,vnd->vnk", self.block.flatten(2), mat.flatten(2))
            result = result + product.reshape(mat.shape)
        return result

    def as_columns(self) -> Hessian:
        """The same with columns only."""
        columns, merged = self.columns, []
        if self.diagonal is not None:
            ((mat, signs),) = unit_columns(self.diagonal)
            merged.append(Columns.start("residual", mat, signs))
        if self.block is not None:
            merged.append(Columns.start("block", *block_columns(self.block)))
        for more in merged:
            columns = more if columns is None else columns.merge(more)
        return Hessian(columns, branched=self.branched)

    def as_block(self) -> Hessian:
        """The same with all that did not branch in the dense block."""
        kept: dict[Root, Tensor] = {}
        block = self.block
        for root, mat in {} if self.columns is None else self.columns.blocks.items():
            if root in self.branched:
                kept[root] = mat
                continue
            flat = mat.flatten(2)
            signed = flat if root.signs is None else flat * root.signs.unsqueeze(-1)
            product = (signed.permute(1, 2, 0) @ flat.transpose(0, 1)).transpose(0, 1)
            product = product.reshape(flat.shape[2], *mat.shape[1:])
            block = product if block is None else block + product
        if self.diagonal is not None:
            flat = self.diagonal.flatten(1)
            dense = torch.diag_embed(flat).transpose(0, 1)
            dense = dense.reshape(flat.shape[1], *self.diagonal.shape)
            block = dense if block is None else block + dense
        return Hessian(Columns(kept) if kept else None, None, block, self.branched)

    def merge(self, other: Hessian) -> Hessian:
        """The sum of what arrived over two branches."""
        columns = self.columns or other.columns
        if self.columns is not None and other.columns is not None:
            columns = self.columns.merge(other.columns)
        return Hessian(
            columns,
            _add(self.diagonal, other.diagonal),
            _add(self.block, other.block),
            self.branched | other.branched,
        )


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
        eye = _unit(call.input)
        return Hessian(self._eigen_columns("loss", rule.hessian_mat_prod(call, eye)))

    def propagate(self, rule: LayerRule, call: ModuleCall, quantity: Hessian) -> dict[int, Hessian]:
        """``J_xᵀ H J_x``, and the residual."""
        if isinstance(rule, ElementwiseRule):
            return {0: self._through_elementwise(rule, call, quantity)}
        live = [position for position, edge in enumerate(call.edges) if edge is not None]
        if not rule.hessian_is_zero and len(live) > 1:
            raise UnsupportedError(
                f"{call.path} is nonlinear in {len(live)} inputs at once, and {type(rule).__name__} "
                "knows no mixed second derivatives: an exact Hessian is not to be had. Use the "
                "generalised Gauss-Newton matrix (DiagGGNExact, GGNMP) instead."
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
                "(Multiplications of two activations, and functional activations, are of this kind)",
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

        return _map_columns(quantity.as_columns(), embed)

    def narrow(self, quantity: Hessian) -> Hessian:
        """The chosen samples."""
        if self.subsampling is None:
            return quantity
        chosen = list(self.subsampling)
        return _map_columns(quantity, lambda mat: mat[:, chosen])

    def move_batch_axis(self, quantity: Hessian, axis: int) -> Hessian:
        """``[V, *, N, *] → [V, N, *, *]``."""
        return _map_columns(quantity.as_columns(), lambda mat: mat.movedim(axis + 1, 1))

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
        result = _map_columns(quantity, lambda mat: mat * slope)
        diagonal = None if quantity.diagonal is None else quantity.diagonal * slope.square()
        if not rule.hessian_is_zero:
            assert call.grad_output is not None
            curvature = self._modify(rule.second_derivative(call) * call.grad_output)
            diagonal = _add(diagonal, curvature)
        block = quantity.block
        if block is not None:
            rows = slope.flatten(1).T.reshape(len(block), len(slope), *[1] * (slope.dim() - 1))
            block = block * slope * rows
        return replace(result, diagonal=diagonal, block=block)

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
        quantity = _cheapest(quantity, call, position)
        residual = None
        if quantity.diagonal is not None and not rule.jacobian_is_constant:
            quantity = quantity.as_columns()
        elif quantity.diagonal is not None:
            residual = _spread_diagonal(rule, call, quantity.diagonal, position)

        def push(mat: Tensor) -> Tensor:
            product = rule.jac_t_mat_prod(call, mat)[position]
            assert product is not None
            return product

        result = replace(_map_columns(quantity, push), diagonal=None, block=None)
        if residual is not None:
            result = result.merge(Hessian(residual))
        if quantity.block is not None:
            half = push(quantity.block)  # [D_out, N, *in]
            turned = half.flatten(2).transpose(0, 2)  # [D_in, N, D_out]
            result = replace(result, block=push(turned.reshape(*turned.shape[:2], *call.output_shape[1:])))
        return {position: result}

    def _residual(self, rule: LayerRule, call: ModuleCall) -> Hessian:
        """``Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²``."""
        grad = call.grad_output
        assert grad is not None
        if rule.hessian_is_diagonal:
            ones = torch.ones_like(call.input).unsqueeze(0)
            curvature = rule.second_derivative_mat_prod(call, grad, ones).squeeze(0)
            return Hessian(diagonal=self._modify(curvature))
        mat = rule.second_derivative_mat_prod(call, grad, _unit(call.input))
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


def block_columns(block: Tensor) -> tuple[Tensor, Tensor]:
    """A dense block ``H`` as ``2 D`` columns with signs, without an eigendecomposition.

    ``H = Σ_d e_d h_dᵀ = 1/4 Σ_d (a e_d + h_d/a)(·)ᵀ - (a e_d - h_d/a)(·)ᵀ`` with the rows ``h_d``. The
    scale ``a² = ‖h_d‖`` balances both parts.

    Args:
        block: Rows ``[D, N, *]``.

    Returns:
        Columns ``[2 D, N, *]`` and signs ``[2 D, N]``.
    """
    size, samples = block.shape[:2]
    rows = block.reshape(size, samples, size)
    tiny = torch.finfo(block.dtype).tiny
    scale = rows.norm(dim=2, keepdim=True).clamp_min(tiny).sqrt()
    unit = torch.eye(size, dtype=block.dtype, device=block.device).unsqueeze(1) * scale
    mat = torch.cat([unit + rows / scale, unit - rows / scale]) / 2
    signs = block.new_ones(2 * size, samples)
    signs[size:] = -1
    return mat.reshape(2 * size, *block.shape[1:]), signs


def _cheapest(quantity: Hessian, call: ModuleCall, position: int) -> Hessian:
    """Collect in a block, if pushing one from both sides takes fewer columns than there are."""
    size_out = call.output_shape[1:].numel()
    size_in = call.inputs[position].shape[1:].numel()
    columns = 0 if quantity.columns is None else len(quantity.columns.mat)
    columns += 0 if quantity.diagonal is None else size_out
    if quantity.block is not None or columns > size_out + size_in:
        return quantity.as_block()
    return quantity


def _spread_diagonal(rule: LayerRule, call: ModuleCall, diagonal: Tensor, position: int) -> Columns:
    """``Jᵀ diag(d) J`` as columns, where one Jacobian serves all samples."""
    one = call.subsample([0])
    product = rule.jac_t_mat_prod(one, _unit(diagonal[:1]))[position]
    assert product is not None
    flat = diagonal.flatten(1).T  # [D, N]
    weights = flat.abs().sqrt().reshape(*flat.shape, *[1] * (product.dim() - 2))
    return Columns.start("residual", product * weights, flat.sign())


def _unit(like: Tensor) -> Tensor:
    """All unit vectors at a tensor ``[N, *]``, for each sample: ``[D, N, *]``."""
    size = like.shape[1:].numel()
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return eye.reshape(size, 1, *like.shape[1:]).expand(-1, *like.shape)


def _map_columns(quantity: Hessian, function: Callable[[Tensor], Tensor]) -> Hessian:
    columns = None if quantity.columns is None else quantity.columns.map(function)
    return replace(quantity, columns=columns)


def _add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
