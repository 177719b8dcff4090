"""The rule of the bilinear layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Bilinear

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.arguments import by_slot, tensor
from backpack_products.parametric import AffineRule


class BilinearRule(AffineRule):
    """``y_o = x₁ᵀ W_o x₂ + b_o``: affine in the parameters, with ``x₁ ⊗ x₂`` as its input."""

    module_types = (Bilinear,)
    # The second derivative in each input is zero, but not the mixed one.
    hessian_is_zero = False

    def check(self, view: View) -> None:
        """Refuse inputs without a batch axis."""
        if tensor(view, "input1").dim() < 2:
            raise UnsupportedError(
                f"{view.path} received inputs without a batch axis: pass [N, *, features], with "
                "N = 1 for one sample."
            )

    def affine_input(self, view: View) -> Tensor:
        """``x₁ ⊗ x₂``. Shape ``[N, S, 1, I₁·I₂]``."""
        first, second = _inputs(view)
        return (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(2).unsqueeze(2)

    def affine_output(self, view: View, mat: Tensor) -> Tensor:
        """The additional axes are positions."""
        return _positions(mat, 2).unsqueeze(3)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        (first, second), columns = _inputs(view), _positions(mat, 2)
        weight = view.parameter("weight")
        products = {
            "input1": torch.einsum("vnso,oij,nsj->vnsi", columns, weight, second),
            "input2": torch.einsum("vnso,oij,nsi->vnsj", columns, weight, first),
        }
        lead = mat.shape[:-1]
        return by_slot(view, {k: (p.reshape(*lead, p.shape[-1]),) for k, p in products.items()})


def _inputs(view: View) -> tuple[Tensor, Tensor]:
    """Both inputs, of shape ``[N, S, I]``."""
    return _positions(tensor(view, "input1"), 1), _positions(tensor(view, "input2"), 1)


def _positions(x: Tensor, lead: int) -> Tensor:
    """Merge the axes between the first ``lead`` ones and the features: ``[..., S, features]``."""
    return x.reshape(*x.shape[:lead], x.shape[lead:-1].numel(), x.shape[-1])
