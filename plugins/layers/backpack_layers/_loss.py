"""Base classes and helpers of loss rules: settings, checks, diagonal and zero Hessians.

Imports torch, backpack_core and ``arguments``. The rules themselves are in ``loss_regression`` and
``loss_classification``. A rule sees a batch or, under subsampling, a view of it; the mean is always
over the whole batch, so targets and weights are read from ``view.full`` and then restricted.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.arguments import slots, tensor
from backpack_products.loss import HessianLossRule, arriving_factor
from backpack_products.values import any_of, at_least_single


def setting(view: View, name: str) -> Any:
    """A plain attribute of the loss module."""
    return getattr(view.module, name)


def module_tensor(view: View, name: str) -> Tensor | None:
    """A tensor of the loss module (``"weight"``), or ``None`` if it has none."""
    return None if setting(view, name) is None else view.parameter(name)


def restrict(view: View, whole: Tensor) -> Tensor:
    """The samples that ``view`` shows, from a tensor over the whole batch ``[N, *]``."""
    return whole if view.indices is None else whole[list(view.indices)]


def broadcast(view: View, what: str, whole: Tensor) -> Tensor:
    """Broadcast ``whole`` to the shape of the input, ``[N, *in]``.

    Raises:
        UnsupportedError: The input would be broadcast, so its samples would share loss terms.
    """
    shape = view.full.input_shape
    try:
        return restrict(view, whole.expand(shape))
    except RuntimeError as error:
        raise UnsupportedError(
            f"{view.path} needs one loss term for each element of its input, of shape "
            f"{list(shape)}, but its {what} has shape {list(whole.shape)}, which does not "
            "broadcast to that, so samples would share terms: give both the same shape."
        ) from error


def mean_over_elements(view: View) -> float:
    """``1/(N D)`` for a mean, with the elements of the whole batch; one for a sum."""
    if setting(view, "reduction") == "mean":
        return 1.0 / max(1, view.full.input_shape.numel())
    return 1.0


def real_sqrt(view: View, curvature: Tensor) -> Tensor:
    """Square root of second derivatives, or of their weights; NaN where one is negative.

    Raises:
        UnsupportedError: One of them is negative, and the pass is measured. Other passes do not
            look, since a look would wait for an accelerator; the NaN shows in the result.
    """
    if view.is_measured and any_of(curvature < 0):
        raise UnsupportedError(
            f"A square root of the Hessian of {view.path} was asked for, but the Hessian is not "
            "positive semi-definite: a class weight is negative, or a target lies outside the "
            "range that the loss is made for. Correct it, or use an extension that needs no square "
            "root."
        )
    return finite_sqrt(curvature)


def finite_sqrt(curvature: Tensor) -> Tensor:
    """The square root, with a derivative of zero at zero: that of products with the root is finite.

    A smooth curvature that is never negative has a minimum where it is zero.
    """
    if not curvature.requires_grad:
        return curvature.sqrt()
    is_zero = curvature == 0
    return curvature.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def check_arguments(view: View, axes: int) -> None:
    """Refuse a call if its arguments are not laid out as rules expect.

    Args:
        view: The loss call.
        axes: How many axes the input needs at least, batch included.

    Raises:
        UnsupportedError: The input is not batched, or not the first argument.
    """
    whole = view.full
    if len(whole.input_shape) < axes:
        raise UnsupportedError(
            f"{view.path} was called with an input of shape {list(whole.input_shape)}, which has "
            f"no batch axis: give it at least {axes} axes, for one sample by unsqueeze(0)."
        )
    if any(0 in places for name, places in slots(whole).items() if name in ("target", "var")):
        raise UnsupportedError(
            f"{view.path} was called with keywords in another order than its forward declares, so "
            "its first tensor is not the prediction: write the prediction first."
        )


class ElementwiseLossRule(HessianLossRule):
    """``ℓ = Σ_i ℓ_i(x_i)`` over all elements of the input, with ``ℓ_i'' ≥ 0``.

    The Hessian of a sample is diagonal: the exact square root has one column for each feature,
    ``V = D``.

    The sampled square root estimates the same Hessian, at the targets of the batch. If ``ℓ_i''``
    does not depend on the target, it is the Fisher information of a likelihood, and targets are
    drawn from that. Otherwise the two differ: ``likelihood`` is empty, and the columns are
    ``√ℓ_i''`` with random signs.

    Class attributes:
        is_never_negative: Whether no target makes ``ℓ_i''`` negative; the module's weights may.
    """

    hessian_is_psd = True
    is_never_negative: ClassVar[bool] = False

    def is_convex(self, view: View) -> bool:
        """Without weights, if no target makes the curvature negative."""
        weights = [getattr(view.module, name, None) for name in ("weight", "pos_weight")]
        return self.is_never_negative and weights == [None, None]

    @abstractmethod
    def curvature(self, view: View) -> Tensor:
        """``ℓ_i''`` of the loss without its reduction. Shape ``[N, *in]``.

        It may leave the range of half precision where its root does not, so it is computed at least
        in single precision.
        """

    def sampled_gradient(self, view: View, samples: int) -> Tensor:
        """Independent, centred numbers of variance :meth:`curvature`. ``[samples, N, *in]``."""
        half = real_sqrt(view, self.curvature(view))
        signs = torch.randint(0, 2, (samples, *half.shape), dtype=half.dtype, device=half.device)
        return half * (2 * signs - 1)

    def check_terms(self, view: View) -> None:
        """Targets must not broadcast the input."""
        check_arguments(view, axes=1)
        self.target(view)

    def target(self, view: View) -> Tensor:
        """The target, of the shape and dtype of the input."""
        return broadcast(view, "target", tensor(view.full, "target")).to(view.dtype)

    def normalisation(self, view: View) -> float | Tensor:
        """A mean is over all elements of the whole batch."""
        return mean_over_elements(view)

    def _sqrt_hessian(self, view: View) -> Tensor:
        half = real_sqrt(view, self._reduced(view)).to(view.dtype)
        features = half.shape[1:].numel()
        flat = half.reshape(len(half), features)
        return torch.diag_embed(flat, dim1=0, dim2=2).reshape(features, *half.shape)

    def _sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        scale = (self.normalisation(view) / samples) ** 0.5
        return (self.sampled_gradient(view, samples) * scale).to(view.dtype)

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return (mat * self._reduced(view)).to(mat.dtype)

    def sum_hessian(self, view: View) -> Tensor:
        """Sum the diagonals first, then form the diagonal matrix."""
        curvature = self._reduced(view) * arriving_factor(view)
        return torch.diag(curvature.sum(0).flatten()).to(view.dtype)

    def _reduced(self, view: View) -> Tensor:
        return at_least_single(self.curvature(view)) * self.normalisation(view)


class LinearLossRule(HessianLossRule):
    """A loss with a zero Hessian in the input (almost everywhere): a single column of zeros.

    Exact quantities are zero. Sampling is refused: the likelihood of this loss has Fisher
    information, and a Monte-Carlo quantity of zero would be mistaken for an estimate of it.
    """

    hessian_is_psd = True
    hessian_is_zero = True

    def check_terms(self, view: View) -> None:
        """Targets must not broadcast the input."""
        check_arguments(view, axes=1)
        broadcast(view, "target", tensor(view.full, "target"))

    def normalisation(self, view: View) -> float | Tensor:
        """A mean is over all elements of the whole batch."""
        return mean_over_elements(view)

    def _sqrt_hessian(self, view: View) -> Tensor:
        return torch.zeros_like(view.input).unsqueeze(0)

    def _sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        raise UnsupportedError(
            f"A Monte-Carlo square root of the Hessian of {view.path} was asked for, but the "
            "Hessian in its input is zero, so there is nothing to sample: exact quantities are "
            f"zero. {self.instead}"
        )

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return torch.zeros_like(mat)

    def sum_hessian(self, view: View) -> Tensor:
        """Zero."""
        size = view.input_shape[1:].numel()
        return view.input.new_zeros(size, size)
