"""Linear systems with a matrix that is given by its products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backpack_core.autocast import without_autocast
from backpack_core.errors import BackpackError, ShapeError, UsageError
from backpack_secondorder.linear import LinearOperator
from backpack_secondorder.matrix import Number
from backpack_secondorder.matrix_arguments import check_damping


class ConvergenceError(BackpackError, ArithmeticError):
    """An iterative method did not reach the requested accuracy."""

    in_manual = True


@dataclass(frozen=True)
class Solution:
    """The result of conjugate gradients.

    Attributes:
        x: The solution, flat, ``[P]``.
        iterations: The number of products.
        residual: ``‖b - (F + damping · I) x‖ / ‖b‖``.
    """

    x: Tensor
    iterations: int
    residual: float


def conjugate_gradients(
    operator: LinearOperator,
    rhs: Tensor,
    damping: Number = 0.0,
    preconditioner: Callable[[Tensor], Tensor] | None = None,
    rtol: float = 1e-5,
    max_iterations: int | None = None,
    strict: bool = True,
) -> Solution:
    """Solve ``(F + damping · I) x = b`` by preconditioned conjugate gradients.

    Hestenes and Stiefel (1952). The matrix must be positive definite.

    Args:
        operator: ``F``.
        rhs: ``b``, flat, ``[P]``.
        damping: Not negative.
        preconditioner: An approximate inverse, symmetric and positive definite, as a function of a
            flat vector: ``lambda v: factors.solve(v, damping)``.
        rtol: Bound on the residual, relative to ``‖b‖``.
        max_iterations: The largest number of products; default: ten times the number of entries.
        strict: Whether to raise an error if ``rtol`` is not reached; otherwise the solution so far
            is returned, with its residual.

    Returns:
        The solution.

    Raises:
        ConvergenceError: ``rtol`` is not reached.
        ShapeError: ``rhs`` is not a flat vector of the matrix's size.
        UsageError: The matrix is not positive definite, the right side is not finite, or an
            argument has the wrong type.
    """
    damping = check_damping(damping)
    if not hasattr(operator, "shape") or not hasattr(operator, "__matmul__"):
        raise UsageError(
            "Conjugate gradients take a matrix with a shape that multiplies vectors by operator @ "
            f"vector: a GGN, a BlockDiagonal, a tensor. Got {operator!r:.80}."
        )
    if not isinstance(rhs, Tensor) or rhs.dim() != 1 or len(rhs) != operator.shape[0]:
        got = list(rhs.shape) if isinstance(rhs, Tensor) else type(rhs).__name__
        raise ShapeError(
            f"Conjugate gradients take the right side as one flat vector "
            f"[{operator.shape[0]}]: torch.cat([part.flatten() for part in parts]). Got {got}."
        )
    if preconditioner is not None and not callable(preconditioner):
        raise UsageError(
            "preconditioner must be a function of a flat vector, such as lambda v: "
            f"factors.solve(v, damping). Got {type(preconditioner).__name__}."
        )
    # Rounded to half precision, residuals would only seem to fall.
    with without_autocast():
        return _solution(operator, rhs, damping, preconditioner, rtol, max_iterations, strict)


def _solution(
    operator: LinearOperator,
    rhs: Tensor,
    damping: Number,
    preconditioner: Callable[[Tensor], Tensor] | None,
    rtol: float,
    max_iterations: int | None,
    strict: bool,
) -> Solution:
    # Squares of small or large entries leave the range of numbers: they are divided by the largest.
    size = rhs.detach().abs().amax() if len(rhs) else rhs.new_ones(())
    if not size.isfinite():
        raise UsageError(
            "The right side of conjugate gradients is not finite: look for inf and nan in the loss "
            "and in its gradients."
        )
    size = torch.where(size > 0, size, 1)
    rhs = rhs / size
    precondition = preconditioner or (lambda vector: vector)
    x, residual = rhs.new_zeros(rhs.shape), rhs.clone()
    bound = rtol * float(rhs.norm())
    norm, iterations = float(rhs.norm()), 0
    most = 10 * len(rhs) if max_iterations is None else max_iterations
    direction = precondition(residual)
    product = residual @ direction
    while norm > bound and iterations < most:
        image = operator @ direction + damping * direction
        curvature = direction @ image
        if not curvature.isfinite():
            raise UsageError(
                "A product with the matrix is not finite, so conjugate gradients cannot go on. "
                "Look for roots and divisions at zero in the net, or for inf and nan in the data."
            )
        if not curvature > 0:
            raise UsageError(
                "Conjugate gradients need a positive definite matrix, and this one has the "
                f"curvature {float(curvature):.2e} along a direction: increase the damping of "
                f"{damping}, or take a generalised Gauss-Newton matrix instead of a Hessian."
            )
        step = product / curvature
        x, residual = x + step * direction, residual - step * image
        norm, iterations = float(residual.norm()), iterations + 1
        preconditioned = precondition(residual)
        product, before = residual @ preconditioned, product
        direction = preconditioned + product / before * direction
    relative = norm / float(rhs.norm()) if norm else 0.0
    if strict and not norm <= bound:
        raise ConvergenceError(
            f"Conjugate gradients reached a residual of {relative:.1e} in {iterations} steps, but "
            f"rtol={rtol:.1e} was asked for: increase max_iterations or the damping, pass a "
            "preconditioner, or pass strict=False."
        )
    return Solution(x * size, iterations, relative)
