"""The base of loss rules that know their Hessian, where curvature starts; and losses' gradients."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor

from backpack_core.contract.bases import base
from backpack_core.contract.rules import LossRule, expect
from backpack_core.errors import ShapeError, UnsupportedError
from backpack_core.record.guards import ask
from backpack_core.record.switch import disable
from backpack_core.record.view import View
from backpack_products.derivatives import SecondOrderRule
from backpack_products.nested import map_tensors
from backpack_products.values import any_of


def arriving_factor(view: View) -> Tensor:
    """The gradient that arrives at a loss, in a shape that multiplies ``[V, N, *in]``.

    Raises:
        ShapeError: There is none, outside of a backward pass.
    """
    grad = view.grad_output
    if grad is None:
        raise ShapeError(f"{view.path} has no gradient yet: call this during backward.")
    if not grad.dim() or grad.shape == view.input_shape:
        return grad
    if grad.dim() == 1:  # of a loss with one value for each sample
        return grad.reshape(-1, *[1] * (len(view.input_shape) - 1))
    return grad.unsqueeze(1)  # other unreduced losses lack the class axis 1


def loss_factor(view: View) -> Tensor:
    """The factor in front of each sample's loss, in a shape that multiplies ``[V, N, *in]``.

    It is the rule's ``normalisation`` times the gradient that arrives at the loss.
    """
    factor: Tensor = arriving_factor(view) * view.call.rule.normalisation(view)
    return factor


def check_first_argument(view: View) -> None:
    """Refuse a loss whose derivative in its first argument is not all of it.

    Raises:
        UnsupportedError: Another argument requires a gradient.
    """
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


def loss_gradient(view: View) -> Tensor:
    """The gradient of each sample's loss, with :func:`loss_factor` in front. Shape ``[N, *in]``.

    Raises:
        UnsupportedError: Another argument than the first requires a gradient.
    """
    check_first_argument(view)
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


@base
class HessianLossRule(SecondOrderRule, LossRule):
    """The rule of a loss ``ℓ(x, target)``, a sum over samples, with its Hessian in ``x``.

    The underscore methods are for the loss *as the module reduces it* (a mean includes its ``1/N``)
    and an incoming gradient of one. The public methods multiply by the gradient that arrives. So
    ``0.5 * loss``, gradient accumulation and ``reduction="none"`` are exact.

    Class attributes:
        hessian_is_psd: The Hessian is positive semi-definite, so that a real square root exists.
        likelihood: The distribution whose negative logarithm is the loss, so that targets can be
            sampled. Empty if there is none.
        instead: What to do for curvature if ``hessian_is_zero``, as a sentence for messages.

    To write:
        ``_sqrt_hessian(view)``: ``[V, N, *in]``, and ``_hessian_mat_prod(view, mat)``:
        ``[V, N, *in] → [V, N, *in]``. Optional: ``_sqrt_hessian_sampled(view, samples)``, with a
        ``likelihood``, and ``normalisation(view)``.
    """

    hessian_is_psd: ClassVar[bool] = False
    likelihood: ClassVar[str] = ""
    instead: ClassVar[str] = ""

    def check(self, view: View) -> None:
        """Refuse a call whose curvature is not determined by the Hessian in the first argument.

        Raises:
            UnsupportedError: Another argument requires a gradient, or :meth:`check_terms` refuses.
        """
        super().check(view)
        check_first_argument(view)

    def is_convex(self, view: View) -> bool:
        """Whether settings and shapes of a call tell that the loss is convex in its input.

        The answer must hold for all numbers in tensors, such as weights or targets. ``DiagHessian``
        then need not look at numbers. Default: it must look.
        """
        return False

    def check_apart(self, view: View, owners: Tensor | None) -> None:
        """Refuse a loss that is not a sum over samples; asked in passes that are measured.

        Default: nothing is looked at, since the loss is one by contract.

        Args:
            view: The loss call.
            owners: The sample of each row of the input, ``[R]``; ``None`` if each is a sample.

        Raises:
            SampleMixingError: Samples influence each other in the loss.
        """

    @abstractmethod
    def _sqrt_hessian(self, view: View) -> Tensor:
        """Columns ``S`` with ``∇²ℓ_n = Σ_v S[v, n] S[v, n]ᵀ``. Shape ``[V, N, *in]``."""

    @abstractmethod
    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        """``∇²ℓ_n mat[v, n]``. Shape ``[V, N, *in] → [V, N, *in]``."""

    def _sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        """Random columns whose outer products sum to the Hessian in expectation. ``[V, N, *in]``.

        ``V = samples``: the columns are gradients for targets drawn from the likelihood, scaled by
        ``1/√samples``. Targets of different samples are independent: with one draw for all, tied
        weights would have a wrong result. Random numbers come from torch's default generator.
        """
        raise UnsupportedError(
            f"{view.path} is not the negative logarithm of a likelihood, so targets cannot be "
            "sampled: use the exact quantity instead of the Monte-Carlo one."
        )

    def sqrt_hessian(self, view: View) -> Tensor:
        """The exact square root of the loss Hessian, times that of the arriving gradient.

        Args:
            view: The loss call.

        Returns:
            Shape ``[V, N, *in]``.

        Raises:
            UnsupportedError: The Hessian, or the arriving gradient, is negative. Only passes that
                are measured raise it; in others the result is NaN.
        """
        return self._asked(view, "_sqrt_hessian") * self._root_scale(view)

    def signed_sqrt_hessian(self, view: View) -> tuple[Tensor, Tensor | None]:
        """Columns ``S`` and a sign ``σ`` with ``∇²ℓ_n = σ Σ_v S[v, n] S[v, n]ᵀ``.

        Args:
            view: The loss call.

        Returns:
            Shape ``[V, N, *in]``; and the sign, ``[]``, or ``None`` for a plus.

        Raises:
            UnsupportedError: The Hessian has no such form.
        """
        scale = arriving_factor(view)
        if not scale.dim() and self.is_convex(view):
            return self._asked(view, "_sqrt_hessian") * scale.abs().sqrt(), scale.sign()
        looking = copy(view)  # in every pass: how many columns there are depends on the numbers
        looking.is_measured = True
        return self.sqrt_hessian(looking), None

    def sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        """A Monte-Carlo square root of the loss Hessian. Shape ``[samples, N, *in]``."""
        return self._asked(view, "_sqrt_hessian_sampled", samples) * self._root_scale(view)

    def hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        """The loss Hessian times columns ``[V, N, *in]``, times the arriving gradient."""
        return self._asked(view, "_hessian_mat_prod", mat) * arriving_factor(view)

    def sum_hessian(self, view: View) -> Tensor:
        """The Hessian summed over samples. Shape ``[D, D]`` with ``D`` the size of one input."""
        shape = view.input_shape[1:]
        size = shape.numel()
        x = view.input
        eye = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *shape)
        columns = self.hessian_mat_prod(view, eye.expand(-1, view.batch_size, *shape))
        return columns.reshape(size, view.batch_size, size).sum(1)

    def _asked(self, view: View, method: str, *arguments: Any) -> Tensor:
        """The checked result of an underscore method."""
        mat: Tensor = ask(view, self, method, view, *arguments)
        expect(view, self, f"{method} returned", mat, view.input_shape)
        return mat

    def _root_scale(self, view: View) -> Tensor:
        scale = arriving_factor(view)
        # In passes that are not measured, the root of a negative number is NaN, and so are results.
        if view.is_measured and any_of(scale < 0):
            raise UnsupportedError(
                f"{view.path} is multiplied by a negative number on its way to the tensor that "
                "backward() was called on, so its curvature has no real square root. Use "
                "DiagHessian or HMP, or call backward() on the loss itself."
            )
        return scale.sqrt()


def with_hessian(rule: LossRule, view: View) -> HessianLossRule:
    """Check that the rule of a loss knows the Hessian; returns the rule.

    Raises:
        UnsupportedError: It does not know the Hessian.
    """
    if isinstance(rule, HessianLossRule):
        return rule
    raise UnsupportedError(
        f"Curvature starts at {view.path}, but {type(rule).__name__} does not know the Hessian: "
        "derive it from backpack_products.HessianLossRule, or leave the extension out."
    )
