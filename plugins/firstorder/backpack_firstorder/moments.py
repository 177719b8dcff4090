"""Moments of the individual gradients over the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core import FirstOrderExtension, LayerRule, ModuleCall, ops


class SumGradSquared(FirstOrderExtension):
    """Sum of the squared individual gradients, an uncentred second moment.

    Stored in ``sum_grad_squared``, shape ``[*θ]``: ``Σ_n (∇_θ ℓ_n)²`` elementwise for a sum, and
    ``1/N² Σ_n (∇_θ ℓ_n)²`` for a mean.

    Linear layers need no individual gradient (Dangel et al., 2020, BackPACK, ICLR, appendix A.1);
    others form some at a time, in the cache.
    """

    savefield = "sum_grad_squared"

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        """A contraction that forms no individual gradients where the rule knows one."""
        return ops.shared(ops.square_sum, rule, call, name, mat)


class Variance(FirstOrderExtension):
    """Variance of the individual gradients, elementwise.

    Stored in ``variance``, shape ``[*θ]``: ``1/N Σ_n g_n² - (1/N Σ_n g_n)²`` with the individual
    gradients ``g_n`` as they arrive, ``∇_θ ℓ_n`` for a sum and ``1/N ∇_θ ℓ_n`` for a mean, and the
    number ``N`` of samples that take part. It is not Bessel-corrected, and rounding may leave a
    small negative number where all gradients agree (Dangel et al., 2020, BackPACK, ICLR, section
    2.2).
    """

    savefield = "variance"
    precedence = 1

    def read(self, rule: LayerRule, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        """Second moment minus squared first moment."""
        samples = mat.shape[1]
        total, squares = ops.shared_moments(rule, call, name, mat)
        total = total.squeeze(0)
        return torch.addcmul(squares / samples, total, total, value=-1 / samples**2)
