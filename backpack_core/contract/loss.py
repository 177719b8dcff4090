"""The contract of losses, at which quantities start."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from backpack_core.contract.bases import base
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import ShapeError, UnsupportedError, UsageError
from backpack_core.record.nested import map_tensors
from backpack_core.record.switch import disable
from backpack_core.record.view import View

Normaliser: TypeAlias = float | Tensor | None  # what a loss divides by; ``None`` for a sum


@base
class LossRule(LayerRule):
    """A loss ``ℓ(x, target)`` that is a sum over samples: quantities start at its first input.

    Public methods include the gradient that arrives at the loss. So ``0.5 * loss``, gradient
    accumulation and ``reduction="none"`` are exact.

    To write:
        Nothing. Optional: ``normalisation(view)`` and ``check_terms(view)``.
    """

    is_loss = True

    def check(self, view: View) -> None:
        """Refuse a call whose curvature is not determined by the Hessian in the first argument.

        Raises:
            UnsupportedError: Another argument requires a gradient, or :meth:`check_terms` refuses.
        """
        self.check_terms(view)
        first, *others = view.full.inputs
        if not any(other.requires_grad for other in others):
            return
        if first.requires_grad:
            raise UnsupportedError(
                f"Curvature of {view.path} is known only for its first argument, but another one "
                "(target or variance) requires a gradient, too: detach it."
            )
        raise UnsupportedError(
            f"{view.path} was called with the target first: its first argument requires no "
            "gradient, and another one does. Swap the arguments, lossfunc(output, target)."
        )

    def check_terms(self, view: View) -> None:
        """Refuse a call in which a term of the loss depends on several samples.

        Args:
            view: The loss call.

        Raises:
            UnsupportedError: Such a term was found; the message says what to write instead.
        """

    def normalisation(self, view: View) -> float | Tensor:
        """The factor that the module's reduction puts in front of the sum (``1/N`` for a mean).

        The default is that of a sum. A rule whose modules have a ``reduction`` overrides it:
        batches of a data set are weighted by it.
        """
        return 1.0

    def factor(self, view: View) -> Tensor:
        """The factor in front of each sample's loss, in a shape that multiplies ``[V, N, *in]``.

        It is :meth:`normalisation` times the gradient that arrives.
        """
        return self._scale(view) * self.normalisation(view)

    def gradient(self, view: View) -> Tensor:
        """Gradient of each sample's loss, with :meth:`factor` in front. Shape ``[N, *in]``."""
        whole = view.full
        x = whole.input
        if not (view.is_differentiable and x.requires_grad):
            x = x.detach().requires_grad_()  # a leaf: no gradient is needed behind it
        first = whole.values.inputs[0]
        args, kwargs = map_tensors((whole.args, whole.kwargs), lambda t: x if t is first else t)
        with disable(), torch.enable_grad():
            output = whole.module(*args, **kwargs)
        (gradient,) = torch.autograd.grad(
            output, x, whole.grad_output, create_graph=view.is_differentiable
        )
        return gradient if view.indices is None else gradient[list(view.indices)]

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        raise UnsupportedError(
            f"{view.path} is a loss: quantities start there, and cannot pass through it."
        )

    def _scale(self, view: View) -> Tensor:
        """The gradient that arrives, in a shape that multiplies ``[V, N, *in]``."""
        grad = view.grad_output
        if grad is None:
            raise ShapeError(f"{view.path} has no gradient yet: call this during backward.")
        if grad.dim() == 0:
            return grad
        return _align(view, grad)


def normaliser_of(view: View) -> Normaliser:
    """The number that a loss divides by; ``None`` for a sum.

    Args:
        view: The loss call.

    Raises:
        UsageError: Neither the module nor its rule gives the number.
        UnsupportedError: The rule refuses the call.
    """
    rule, reduction = view.call.rule, getattr(view.module, "reduction", None)
    assert isinstance(rule, LossRule)
    rule.check_terms(view)  # a target that broadcasts against the output couples samples
    if reduction == "sum":
        return None
    is_defined = type(rule).normalisation is not LossRule.normalisation
    if reduction not in ("mean", "batchmean") or not is_defined:
        raise UsageError(
            f"{view.path} has reduction {reduction!r}, and {type(rule).__name__} does not say what "
            "that divides by: use reduction='mean' or 'sum', or give normaliser=, which is the "
            "number of samples for a mean over them, and None for a sum."
        )
    return 1 / rule.normalisation(view)


def _align(view: View, grad: Tensor) -> Tensor:
    """The gradient of an unreduced loss, with as many axes as the loss's input.

    An elementwise loss has the input's shape, or one value for each sample. Otherwise it lacks the
    class axis 1.
    """
    if grad.shape == view.input_shape:
        return grad
    if grad.dim() == 1:
        return grad.reshape(-1, *[1] * (len(view.input_shape) - 1))
    return grad.unsqueeze(1)
