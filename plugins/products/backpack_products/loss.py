"""Rules of losses that know their Hessian, where curvature starts."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from backpack_core.contract.bases import base
from backpack_core.contract.loss import LossRule
from backpack_core.contract.rules import expect
from backpack_core.errors import UnsupportedError
from backpack_core.record.guards import ask
from backpack_core.record.view import View
from backpack_products.derivatives import SecondOrderRule
from backpack_products.values import any_of


@base
class HessianLossRule(SecondOrderRule, LossRule):
    """A loss ``ℓ(x, target)`` that is a sum over samples, with its Hessian in the first input.

    The underscore methods speak of the loss *as the module reduces it* (a mean carries its ``1/N``)
    for an incoming gradient of one. The public methods put in the gradient that really arrives.

    Class attributes:
        hessian_is_psd: The Hessian is positive semi-definite, so that a real square root exists.
        likelihood: Why Monte-Carlo sampling makes sense: the loss is the negative logarithm of
            this distribution. Empty where it is none.
        instead: What to do for curvature where ``hessian_is_zero``, as a sentence for messages.

    To write:
        ``_sqrt_hessian(view)``: ``[V, N, *in]``, and ``_hessian_mat_prod(view, mat)``:
        ``[V, N, *in] → [V, N, *in]``. Optional: ``_sqrt_hessian_sampled(view, samples)``, with a
        ``likelihood``, and ``normalisation(view)``.
    """

    hessian_is_psd: ClassVar[bool] = False
    likelihood: ClassVar[str] = ""
    instead: ClassVar[str] = ""

    @abstractmethod
    def _sqrt_hessian(self, view: View) -> Tensor:
        """Columns ``S`` with ``∇²ℓ_n = Σ_v S[v, n] S[v, n]ᵀ``. Shape ``[V, N, *in]``."""

    @abstractmethod
    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        """``∇²ℓ_n mat[v, n]``. Shape ``[V, N, *in] → [V, N, *in]``."""

    def _sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        """Columns whose outer products are the Hessian in expectation. Shape ``[V, N, *in]``.

        ``V = samples``: gradients for targets drawn from the model's likelihood, scaled by
        ``1/√samples``. Random numbers come from torch's default generator.
        """
        raise UnsupportedError(
            f"{view.path} is not the negative logarithm of a likelihood, so there is nothing to "
            "sample from: use the exact quantity instead of the Monte-Carlo one."
        )

    def sqrt_hessian(self, view: View) -> Tensor:
        """Exact square root of the loss Hessian, including the gradient that arrives.

        Args:
            view: The loss call.

        Returns:
            Shape ``[V, N, *in]``.

        Raises:
            UnsupportedError: The Hessian, or the arriving gradient, is not positive semi-definite.
                Said in passes that are measured; in others, what comes of it is not a number.
        """
        return self._asked(view, "_sqrt_hessian") * self._root_scale(view)

    def sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        """Monte-Carlo square root of the loss Hessian. Shape ``[samples, N, *in]``."""
        return self._asked(view, "_sqrt_hessian_sampled", samples) * self._root_scale(view)

    def hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        """Loss Hessian times columns ``[V, N, *in]``, with the arriving gradient as factor."""
        return self._asked(view, "_hessian_mat_prod", mat) * self._scale(view)

    def sum_hessian(self, view: View) -> Tensor:
        """The Hessian summed over samples. Shape ``[D, D]`` with ``D`` the size of one input."""
        shape = view.input_shape[1:]
        size = shape.numel()
        x = view.input
        eye = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *shape)
        columns = self.hessian_mat_prod(view, eye.expand(-1, view.batch_size, *shape))
        return columns.reshape(size, view.batch_size, size).sum(1)

    def _asked(self, view: View, method: str, *arguments: Any) -> Tensor:
        mat: Tensor = ask(view, self, method, view, *arguments)
        expect(view, self, f"{method} returned", mat, view.input_shape)
        return mat

    def _root_scale(self, view: View) -> Tensor:
        scale = self._scale(view)
        # Where nobody looks, the root of a negative number is none, and so is what it multiplies.
        if view.is_measured and any_of(scale < 0):
            raise UnsupportedError(
                f"{view.path} is multiplied by a negative number on its way to the tensor that "
                "backward() was called on, so its curvature has no real square root. Use "
                "DiagHessian or HMP, or call backward() on the loss itself."
            )
        return scale.sqrt()


def with_hessian(rule: LossRule, view: View) -> HessianLossRule:
    """The rule of a loss, which has to know its Hessian.

    Raises:
        UnsupportedError: It does not.
    """
    if isinstance(rule, HessianLossRule):
        return rule
    raise UnsupportedError(
        f"Curvature starts at {view.path}, and {type(rule).__name__} does not know the Hessian: "
        "derive it from backpack_products.HessianLossRule, or leave the extension out."
    )
