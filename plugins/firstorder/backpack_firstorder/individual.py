"""Individual gradients and their second moment."""

from __future__ import annotations

from torch import Tensor

from backpack_core import FirstOrderExtension, LayerRule, ModuleCall, ops


class BatchGrad(FirstOrderExtension):
    """Individual gradients.

    Stored in ``grad_batch``, shape ``[N, *θ]``: the gradient of sample ``n``'s part of the loss,
    ``∇_θ ℓ_n`` for a sum and ``1/N ∇_θ ℓ_n`` for a mean, so that ``Σ_n grad_batch[n] = grad``.
    With ``subsampling``, only the chosen samples, scaled as in the whole batch.
    """

    savefield = "grad_batch"

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        """The per-sample product itself."""
        return ops.per_sample(rule, call, name, mat).squeeze(0)


class SumGradSquared(FirstOrderExtension):
    """Sum of the squared individual gradients, an uncentred second moment.

    Stored in ``sum_grad_squared``, shape ``[*θ]``: ``Σ_n (∇_θ ℓ_n)²`` elementwise for a sum, and
    ``1/N² Σ_n (∇_θ ℓ_n)²`` for a mean.
    """

    savefield = "sum_grad_squared"

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        """A contraction that forms no individual gradients where the rule knows one."""
        return ops.square_sum(rule, call, name, mat)
