"""The contract of losses, where quantities start. Imports torch and the layer-rule contract."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from backpack_core.calls import ModuleCall
from backpack_core.errors import ShapeError, UnsupportedError
from backpack_core.rules import LayerRule


class LossRule(LayerRule):
    """A loss ``ℓ(x, target)`` that is a sum over samples, with its Hessian in the first input.

    The underscore methods speak of the loss *as the module reduces it* (a mean carries its ``1/N``)
    for an incoming gradient of one. The public methods put in the gradient that really arrives, so
    that ``0.5 * loss``, gradient accumulation and ``reduction="none"`` are exact.

    Class attributes:
        hessian_is_psd: The Hessian is positive semi-definite, so that a real square root exists.
        likelihood: Why Monte-Carlo sampling makes sense: the loss is the negative logarithm of
            this distribution. Empty where it is none.
    """

    hessian_is_psd: ClassVar[bool] = False
    likelihood: ClassVar[str] = ""

    @abstractmethod
    def _sqrt_hessian(self, call: ModuleCall) -> Tensor:
        """Columns ``S`` with ``∇²ℓ_n = Σ_v S[v, n] S[v, n]ᵀ``. Shape ``[V, N, *in]``."""

    @abstractmethod
    def _hessian_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        """``∇²ℓ_n mat[v, n]``. Shape ``[V, N, *in] → [V, N, *in]``."""

    def _sqrt_hessian_sampled(self, call: ModuleCall, samples: int) -> Tensor:
        """Columns whose outer products are the Hessian in expectation. Shape ``[V, N, *in]``.

        ``V = samples``: gradients for targets drawn from the model's likelihood, scaled by
        ``1/√samples``. Random numbers come from torch's default generator.
        """
        raise UnsupportedError(
            f"{call.path} is not the negative logarithm of a likelihood, so there is nothing to "
            "sample from: use the exact quantity instead of the Monte-Carlo one."
        )

    def normalisation(self, call: ModuleCall) -> float | Tensor:
        """The factor the module's reduction puts in front of the sum (``1/N`` for a mean)."""
        return 1.0

    def factor(self, call: ModuleCall) -> Tensor:
        """What stands in front of each sample's loss, shaped to multiply ``[V, N, *in]``.

        The module's reduction (:meth:`normalisation`) times the gradient that really arrives.
        """
        return self._scale(call) * self.normalisation(call)

    def gradient(self, call: ModuleCall) -> Tensor:
        """Gradient of each sample's loss, with :meth:`factor` in front. Shape ``[N, *in]``."""
        from backpack_core.autodiff import loss_gradient

        return loss_gradient(call)

    def sqrt_hessian(self, call: ModuleCall) -> Tensor:
        """Exact square root of the loss Hessian, columns times the root of the arriving gradient.

        Args:
            call: The loss call.

        Returns:
            Shape ``[V, N, *in]``.

        Raises:
            UnsupportedError: The Hessian, or the arriving gradient, is not positive semi-definite.
        """
        return self._sqrt_hessian(call) * self._root_scale(call)

    def sqrt_hessian_sampled(self, call: ModuleCall, samples: int) -> Tensor:
        """Monte-Carlo square root of the loss Hessian. Shape ``[samples, N, *in]``."""
        return self._sqrt_hessian_sampled(call, samples) * self._root_scale(call)

    def hessian_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        """Loss Hessian times columns ``[V, N, *in]``, with the arriving gradient as factor."""
        return self._hessian_mat_prod(call, mat) * self._scale(call)

    def sum_hessian(self, call: ModuleCall) -> Tensor:
        """The Hessian summed over samples. Shape ``[D, D]`` with ``D`` the size of one input."""
        shape = call.input_shape[1:]
        size = shape.numel()
        x = call.input
        eye = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *shape)
        columns = self.hessian_mat_prod(call, eye.expand(-1, call.batch_size, *shape))
        return columns.reshape(size, call.batch_size, size).sum(1)

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        raise UnsupportedError(
            f"{call.path} is a loss: quantities start there, none is carried through it."
        )

    def _scale(self, call: ModuleCall) -> Tensor:
        """The arriving gradient, shaped to multiply ``[V, N, *in]``."""
        grad = call.grad_output
        if grad is None:
            raise ShapeError(f"{call.path} has no gradient yet: call this during backward.")
        if grad.dim() == 0:
            return grad
        return _align(call, grad)

    def _root_scale(self, call: ModuleCall) -> Tensor:
        scale = self._scale(call)
        if bool((scale < 0).any()):
            raise UnsupportedError(
                f"{call.path} is multiplied by a negative number on its way to the tensor that "
                "backward() was called on, so its curvature has no real square root. Use "
                "DiagHessian or HMP, or call backward() on the loss itself."
            )
        return scale.sqrt()


def _align(call: ModuleCall, grad: Tensor) -> Tensor:
    """Give the gradient of an unreduced loss the number of axes of the input.

    An elementwise loss has the input's shape. Otherwise the class axis 1 is missing.
    """
    if grad.shape == call.input_shape:
        return grad
    return grad.unsqueeze(1)
