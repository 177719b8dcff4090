"""Rules of affine layers that store or apply their weight differently from ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable

from einops import rearrange
from torch import Tensor

from backpack_core import View
from backpack_core.errors import UnsupportedError
from backpack_products import AffineRule


class TokenwiseRule(AffineRule):
    """An affine map of the last axis; the axes between batch and features share it."""

    jacobian_is_constant = True

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        if len(view.input_shape) < 2:
            raise UnsupportedError(
                f"{view.path} saw an input of shape {list(view.input_shape)}, which has no batch "
                "axis, so it has no samples: use an input [N, ..., features]."
            )

    def affine_input(self, view: View) -> Tensor:
        """The input, a view."""
        x = view.input
        return x.reshape(x.shape[0], x.shape[1:-1].numel(), 1, x.shape[-1])

    def affine_output(self, view: View, mat: Tensor) -> Tensor:
        """The columns, a view."""
        return mat.reshape(*mat.shape[:2], mat.shape[2:-1].numel(), 1, mat.shape[-1])


class Conv1DRule(TokenwiseRule):
    """``y = x W + b`` with a weight ``[I, O]``, as GPT-2 stores it."""

    module_types = ("transformers.pytorch_utils.Conv1D",)

    def arrangement(self, view: View, name: str) -> Callable[[Tensor], Tensor] | None:
        """Inputs come first in the weight."""
        return None if name == "bias" else _inputs_first

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat @ view.parameter("weight").mT


class LinearRule(TokenwiseRule):
    """``y = x Wᵀ + b`` with a weight ``[O, I]``, in subclasses of ``nn.Linear``.

    They override ``forward``, so the rule of ``nn.Linear`` does not apply by inheritance.
    """

    module_types = ("transformers.models.falcon.modeling_falcon.FalconLinear",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat @ view.parameter("weight")


def _inputs_first(blocks: Tensor) -> Tensor:
    """``[*lead, 1, O, I] → [*lead, I, O]``."""
    arranged: Tensor = rearrange(blocks, "... 1 o i -> ... i o")
    return arranged
