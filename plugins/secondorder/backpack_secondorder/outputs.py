"""A loss for who has none: the sum of a model's outputs, from which quantities of these start."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import View
from backpack_core.errors import UnsupportedError
from backpack_products import HessianLossRule


class SumOutputs(Module):
    """The sum of all outputs, ``Σ_n Σ_c f_c(x_n)``, as a loss without targets.

    It says where a model ends, for quantities of its output alone: ``Jacobians``, ``NTK``, ``JMP``.
    ``BatchGrad`` of it is the gradient of each sample's (summed) output, ``DiagHessian`` the
    diagonal of that output's Hessian.

    Example:
        >>> model, outputs = extend(model), extend(SumOutputs())
        >>> with backpack(Jacobians(), gradient="skipped"):
        ...     outputs(model(x)).backward()
    """

    reduction = "sum"

    def forward(self, output: Tensor) -> Tensor:
        """``[N, *] →`` a number.

        Raises:
            UnsupportedError: The output is complex.
        """
        if output.is_complex():
            raise UnsupportedError(
                "The output is complex, and a derivative in real parameters has two rows for each "
                "of its numbers: give SumOutputs torch.view_as_real(output)."
            )
        return output.sum()


class SumOutputsRule(HessianLossRule):
    """The rule of :class:`SumOutputs`, whose Hessian is zero."""

    module_types = (SumOutputs,)
    hessian_is_zero = True
    hessian_is_psd = True
    instead = "Curvature needs a loss; of the outputs themselves, DiagHessian and HMP exist."

    def _sqrt_hessian(self, view: View) -> Tensor:
        return torch.zeros_like(view.input).unsqueeze(0)

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return torch.zeros_like(mat)
