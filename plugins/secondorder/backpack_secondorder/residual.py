"""The residual of a nonlinear call: ``Σ_o ∂ℓ/∂y_o ∂²f_o/∂x²`` for each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from einops import rearrange
from torch import Tensor

from backpack_core import LayerRule, View
from backpack_core.errors import UnsupportedError
from backpack_products import Columns, ElementwiseRule
from backpack_products.derivatives import second_derivative_mat_prod, second_order
from backpack_secondorder.linalg import eigh

Residual: TypeAlias = Literal["exact", "clip", "abs"]


def live_inputs(view: View) -> list[int]:
    """Positions of the inputs that the call must send a quantity to."""
    return [position for position, edge in enumerate(view.call.edges) if edge is not None]


def require_one_input(rule: LayerRule, view: View) -> None:
    """Refuse a nonlinear call with live inputs behind the first (see :func:`live_inputs`).

    Raises:
        UnsupportedError: Its second derivatives in these inputs, or mixed ones, are not known.
    """
    live = live_inputs(view)
    if not second_order(rule).hessian_is_zero and any(live):
        which = f"{len(live)} inputs at once" if len(live) > 1 else f"its input {live[0]}"
        raise UnsupportedError(
            f"{view.path} is nonlinear in {which}, but {type(rule).__name__} knows second "
            "derivatives only in the first input (0): rules cannot compute an exact Hessian. "
            "Use DiagHMP or HMP, or the generalised Gauss-Newton matrix (DiagGGNExact, "
            "GGNMP)."
        )


def diagonal_residual(rule: LayerRule, view: View) -> Tensor | None:
    """The residual, if it is diagonal. Shape ``[N, *in]``; ``None`` if it is not."""
    grad = view.grad_output
    assert grad is not None
    if isinstance(rule, ElementwiseRule):
        return rule.second_derivative(view) * grad
    if not second_order(rule).hessian_is_diagonal:
        return None
    ones = torch.ones_like(view.input).unsqueeze(0)
    return second_derivative_mat_prod(rule, view, grad, ones).squeeze(0)


def dense_residual(rule: LayerRule, view: View) -> Callable[[slice], Tensor]:
    """The rows of the residual: a function of a slice of ``range(D)``, with ``[d, N, *in]``."""
    grad = view.grad_output
    assert grad is not None

    def rows(some: slice) -> Tensor:
        return second_derivative_mat_prod(rule, view, grad, unit_vectors(view.input, some))

    return rows


def unit_vectors(like: Tensor, some: slice = slice(None)) -> Tensor:
    """Unit vectors at a tensor ``[N, *]``, for each sample: ``[d, N, *]``."""
    size = like.shape[1:].numel()
    places = torch.arange(size, device=like.device)[some]
    eye = (places[:, None] == torch.arange(size, device=like.device)).to(like.dtype)
    return eye.reshape(len(places), 1, *like.shape[1:]).expand(-1, *like.shape)


def eigen(block: Tensor, is_measured: bool) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[N, D]`` and vectors ``[N, D, D]`` of symmetric matrices ``[D, N, *]``."""
    size, samples = block.shape[:2]
    matrices = rearrange(block.reshape(size, samples, size), "d n e -> n d e")
    return eigh((matrices + matrices.mT) / 2, is_measured)


def modified(values: Tensor, modify: Residual) -> Tensor:
    """Eigenvalues unchanged, or with negative ones set to zero or made positive."""
    if modify == "exact":
        return values
    return values.clamp(min=0) if modify == "clip" else values.abs()


def eigen_columns(name: str, block: Tensor, is_measured: bool) -> Columns:
    """Symmetric matrices ``[D, N, *]`` as columns: eigenvectors times ``√|λ|``, and signs."""
    values, vectors = eigen(block, is_measured)
    mat = rearrange(vectors * values.abs().sqrt().unsqueeze(1), "n d v -> v n d")
    return Columns.start(name, mat.reshape(block.shape), values.sign().T)
