"""A loss for quantities of a model's outputs: the sum of these outputs."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import View
from backpack_core.errors import UnsupportedError, UsageError
from backpack_products import HessianLossRule


class SumOutputs(Module):
    """The sum of all outputs, ``Σ_n Σ_c f_c(x_n)``, as a loss without targets.

    It says where a model ends, for quantities of its output: ``Jacobians``, ``NTK``, ``JMP``. With
    it, ``BatchGrad`` is the gradient of each sample's (summed) output, and ``DiagHessian`` the
    diagonal of that output's Hessian.

    Example:
        >>> model, outputs = extend(model), extend(SumOutputs())
        >>> with backpack(Jacobians(), gradient="skipped"):
        ...     outputs(model(x)).backward()
    """

    def __init__(self, reduction: Literal["sum", "mean", "none"] = "sum") -> None:
        """Store the setting.

        Args:
            reduction: The sum over samples, their mean, or the sum of each sample's outputs.

        Raises:
            UsageError: The reduction is unknown.
        """
        super().__init__()
        if reduction not in ("sum", "mean", "none"):
            raise UsageError(f'reduction must be "sum", "mean" or "none". Got {reduction!r}.')
        self.reduction = reduction

    def forward(self, output: Tensor, target: object = None) -> Tensor:
        """``[N, *] →`` a number; without a reduction ``[N]``.

        Args:
            output: What the model returns.
            target: Not used: loaders may give one.

        Raises:
            UnsupportedError: The output is complex.
            UsageError: It is not one tensor.
        """
        given: object = output
        if not isinstance(given, Tensor):
            raise UsageError(
                "SumOutputs takes one tensor, [N, *]. If the model returns several, join them: "
                f"SumOutputs()(torch.cat([a, b], 1)). Got {type(given).__name__}."
            )
        if output.is_complex():
            raise UnsupportedError(
                "The output is complex, and a derivative in real parameters has two rows for each "
                "of its numbers: give SumOutputs torch.view_as_real(output)."
            )
        each = output.flatten(1).sum(1) if output.dim() > 1 else output
        if self.reduction == "none":
            return each
        return each.sum() if self.reduction == "sum" else each.mean()


class SumOutputsRule(HessianLossRule):
    """The rule of :class:`SumOutputs`; its Hessian is zero."""

    module_types = (SumOutputs,)
    hessian_is_zero = True
    hessian_is_psd = True
    instead = "Curvature needs a loss; for the outputs themselves, use DiagHessian or HMP."

    def normalisation(self, view: View) -> float:
        """A mean is over samples."""
        is_mean = cast(SumOutputs, view.module).reduction == "mean"
        return 1.0 / max(1, view.full.batch_size) if is_mean else 1.0

    def _sqrt_hessian(self, view: View) -> Tensor:
        return torch.zeros_like(view.input).unsqueeze(0)

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return torch.zeros_like(mat)
