"""Moments of the individual gradients over the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core import SampleProduct
from backpack_core.contract.operations import batch_sum, square_sum
from backpack_firstorder.norms import in_single
from backpack_firstorder.squares import SquaresExtension


class SumGradSquared(SquaresExtension):
    """Sum of the squared individual gradients, an uncentred second moment.

    Stored in ``sum_grad_squared``, shape ``[*θ]``: ``Σ_n (∇_θ ℓ_n)²`` elementwise for a sum, and
    ``1/N² Σ_n (∇_θ ℓ_n)²`` for a mean; in single precision at least.

    Linear layers need no individual gradient (Dangel et al., 2020, BackPACK, ICLR, appendix A.1);
    others form some at a time, in the cache.
    """

    savefield = "sum_grad_squared"
    needs = (square_sum,)

    def read(self, product: SampleProduct) -> Tensor:
        """A contraction that forms no individual gradients where the product knows one."""
        return square_sum(in_single(product))


class Variance(SquaresExtension):
    """Variance of the individual gradients, elementwise.

    Stored in ``variance``, shape ``[*θ]``: ``1/N Σ_n g_n² - (1/N Σ_n g_n)²`` with the individual
    gradients ``g_n`` as they arrive, ``∇_θ ℓ_n`` for a sum and ``1/N ∇_θ ℓ_n`` for a mean, and the
    number ``N`` of samples that take part. It is not Bessel-corrected, and rounding may leave a
    small negative number where all gradients agree. In single precision at least. Dangel et al.
    (2020), BackPACK, ICLR, section 2.2.
    """

    savefield = "variance"
    needs = (batch_sum, square_sum)

    def read(self, product: SampleProduct) -> Tensor:
        """Second moment minus squared first moment."""
        samples, product = max(1, product.samples), in_single(product)  # of none, it is zero
        total, squares = batch_sum(product).squeeze(0), square_sum(product)
        return torch.addcmul(squares / samples, total, total, value=-1 / samples**2)
