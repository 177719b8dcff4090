"""Rules of layers that apply affine maps inside: their parameters, written once."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from backpack_core import contractions
from backpack_core.calls import ModuleCall
from backpack_core.rules import ParametricRule


class AffinePairsRule(ParametricRule):
    """Every parameter is a weight or a bias of some ``y[n, s, g] = W[g] x[n, s, g] + b[g]``.

    ``y`` need not be the layer's output: it may lie anywhere inside, as the gates of a recurrent
    cell do. ``s`` runs over the positions (tokens, time steps) that share ``W``, ``g`` over maps
    that one parameter stacks.
    """

    @abstractmethod
    def affine_pair(self, call: ModuleCall, name: str, mat: Tensor) -> tuple[Tensor, Tensor | None]:
        """What determines the Jacobian of one parameter.

        Args:
            call: The forward execution.
            name: Which parameter.
            mat: Columns at the output. Shape ``[V, N, *out]``.

        Returns:
            The columns carried back to ``y``, shape ``[V, N, S, G, O]``, and for a weight ``x``,
            shape ``[N, S, G, I]``; ``None`` for a bias.
        """

    def _param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        out, inp = self.affine_pair(call, name, mat)
        product = out.sum(2) if inp is None else contractions.products(out, inp)
        return product.reshape(*product.shape[:2], *call.parameter(name).shape)
