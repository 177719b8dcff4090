"""Module extensions that carry columns by transposed Jacobians. Imports module_extension."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.extensions.module_extension import ModuleExtension


class MatToJacMat(ModuleExtension):
    """Carries columns ``[V, N, *out]``, or a list of them, to ``[V, N, *in]``.

    Args:
        derivatives: The layer's derivatives.
        params: Names of the parameters.
    """

    def __init__(self, derivatives: BaseDerivatives, params: list[str] | None = None) -> None:
        super().__init__(params)
        self.derivatives = derivatives

    def backpropagate(
        self, ext: Any, module: Module, grad_inp: Any, grad_out: Any, backproped: Any
    ) -> Any:
        """Transposed Jacobian products."""
        many = backproped if isinstance(backproped, list) else [backproped]
        products = [
            self.derivatives.jac_t_mat_prod(
                module, grad_inp, grad_out, mat, subsampling=ext.get_subsampling()
            )
            for mat in many
        ]
        return products if isinstance(backproped, list) else products[0]
