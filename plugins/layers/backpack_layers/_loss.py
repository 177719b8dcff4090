"""What several loss rules share: settings, checks, and two shapes of Hessian.

Imports torch, backpack_core and ``arguments``. The rules themselves are in ``loss_regression`` and
``loss_classification``. A rule sees a batch or, under subsampling, a view of it; the mean is always
over the whole batch, so targets and weights are read from ``call.full`` and then restricted.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from backpack_core.calls import ModuleCall
from backpack_core.errors import UnsupportedError
from backpack_core.loss_rule import LossRule
from backpack_layers.arguments import slots, tensor


def setting(call: ModuleCall, name: str) -> Any:
    """A plain attribute of the loss module."""
    return getattr(call.module, name)


def module_tensor(call: ModuleCall, name: str) -> Tensor | None:
    """A tensor of the loss module (``"weight"``), or ``None`` where it has none."""
    return None if setting(call, name) is None else call.parameter(name)


def restrict(call: ModuleCall, whole: Tensor) -> Tensor:
    """The samples that ``call`` shows, out of a tensor over the whole batch ``[N, *]``."""
    return whole if call.indices is None else whole[list(call.indices)]


def spread(call: ModuleCall, what: str, whole: Tensor) -> Tensor:
    """Broadcast ``whole`` to the shape of the input, ``[N, *in]``.

    Raises:
        UnsupportedError: The input itself would be broadcast: its samples then share loss terms.
    """
    shape = call.full.input_shape
    try:
        return restrict(call, whole.expand(shape))
    except RuntimeError as error:
        raise UnsupportedError(
            f"Curvature of {call.path} needs one loss term for each element of the input, of "
            f"shape {list(shape)}, but its {what} has shape {list(whole.shape)}, which does not "
            "broadcast to that: give both the same shape."
        ) from error


def real_root(call: ModuleCall, curvature: Tensor) -> Tensor:
    """Square root of second derivatives or of the weights in front of them.

    Raises:
        UnsupportedError: One of them is negative.
    """
    if bool((curvature < 0).any()):
        raise UnsupportedError(
            f"A square root of the Hessian of {call.path} was asked for, but the Hessian is not "
            "positive semi-definite: a class weight is negative, or a target lies outside the "
            "range that the loss is made for. Correct it, or use an extension that needs no root."
        )
    return curvature.sqrt()


def check_arguments(call: ModuleCall, axes: int) -> None:
    """Refuse a call whose Hessian in the first input is not the whole story.

    Args:
        call: The loss call.
        axes: How many axes the input needs at least, batch included.

    Raises:
        UnsupportedError: The input is not batched, not the first argument, or not the only
            argument that requires a gradient.
    """
    whole = call.full
    if len(whole.input_shape) < axes:
        raise UnsupportedError(
            f"{call.path} was called with an input of shape {list(whole.input_shape)}, which has "
            f"no batch axis: give it at least {axes} axes, for one sample by unsqueeze(0)."
        )
    if any(0 in places for name, places in slots(whole).items() if name in ("target", "var")):
        raise UnsupportedError(
            f"{call.path} was called with keywords in another order than its forward declares, so "
            "its first tensor is not the prediction: write the prediction first."
        )
    if any(other.requires_grad for other in whole.inputs[1:]):
        raise UnsupportedError(
            f"Curvature of {call.path} is known for its first argument alone, but another one "
            "(target or variance) requires a gradient: detach it, and pass the prediction first."
        )


class ElementwiseLossRule(LossRule):
    """``ℓ = Σ_i ℓ_i(x_i)`` over all elements of the input, with ``ℓ_i'' ≥ 0``.

    The Hessian of a sample is diagonal: the exact root has one column for each feature, ``V = D``.

    The sampled root estimates that same Hessian, at the targets of the batch. Where ``ℓ_i''`` does
    not depend on the target it is the Fisher information of a likelihood, which is then sampled.
    Where it does, the two differ (``likelihood`` is empty), and ``√ℓ_i''`` gets random signs.
    """

    hessian_is_psd = True

    @abstractmethod
    def curvature(self, call: ModuleCall) -> Tensor:
        """``ℓ_i''`` of the loss without its reduction. Shape ``[N, *in]``."""

    def sampled_gradient(self, call: ModuleCall, samples: int) -> Tensor:
        """Independent, centred numbers of variance :meth:`curvature`. ``[samples, N, *in]``."""
        root = real_root(call, self.curvature(call))
        signs = torch.randint(0, 2, (samples, *root.shape), dtype=root.dtype, device=root.device)
        return root * (2 * signs - 1)

    def check(self, call: ModuleCall) -> None:
        """Targets must not broadcast the input, nor require a gradient."""
        check_arguments(call, axes=1)
        self.target(call)

    def target(self, call: ModuleCall) -> Tensor:
        """The target, of the shape and dtype of the input."""
        return spread(call, "target", tensor(call.full, "target")).to(call.dtype)

    def normalisation(self, call: ModuleCall) -> float:
        """A mean is over all elements of the whole batch."""
        if setting(call, "reduction") == "mean":
            return 1.0 / call.full.input_shape.numel()
        return 1.0

    def _sqrt_hessian(self, call: ModuleCall) -> Tensor:
        root = real_root(call, self.curvature(call) * self.normalisation(call))
        features = root.shape[1:].numel()
        flat = root.reshape(len(root), features)
        return torch.diag_embed(flat, dim1=0, dim2=2).reshape(features, *root.shape)

    def _sqrt_hessian_sampled(self, call: ModuleCall, samples: int) -> Tensor:
        scale: float = (self.normalisation(call) / samples) ** 0.5
        return self.sampled_gradient(call, samples) * scale

    def _hessian_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return mat * (self.curvature(call) * self.normalisation(call))

    def sum_hessian(self, call: ModuleCall) -> Tensor:
        """Diagonal, so summed before it is spread out."""
        curvature = self.curvature(call) * self.normalisation(call) * self._scale(call)
        return torch.diag(curvature.sum(0).flatten())


class LinearLossRule(LossRule):
    """A loss whose Hessian in the input vanishes (almost everywhere): the root is a zero column.

    Exact quantities are then zero. Sampling is refused: a likelihood behind such a loss has Fisher
    information, so a Monte-Carlo quantity of zero would be mistaken for an estimate of it.

    Class attributes:
        axes: How many axes the input needs at least.
        instead: What to do, for the message.
    """

    hessian_is_psd = True
    hessian_is_zero = True
    axes: ClassVar[int] = 1
    instead: ClassVar[str] = ""

    def check(self, call: ModuleCall) -> None:
        """Targets must not require a gradient."""
        check_arguments(call, self.axes)

    def _sqrt_hessian(self, call: ModuleCall) -> Tensor:
        return torch.zeros_like(call.input).unsqueeze(0)

    def _sqrt_hessian_sampled(self, call: ModuleCall, samples: int) -> Tensor:
        raise UnsupportedError(
            f"A Monte-Carlo square root of the Hessian of {call.path} was asked for, but the "
            "Hessian in its input is zero, so there is nothing to sample: exact quantities are "
            f"zero. {self.instead}"
        )

    def _hessian_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return torch.zeros_like(mat)

    def sum_hessian(self, call: ModuleCall) -> Tensor:
        """Zero."""
        size = call.input_shape[1:].numel()
        return call.input.new_zeros(size, size)
