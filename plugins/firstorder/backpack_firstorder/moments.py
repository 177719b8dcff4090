"""Moments of the individual gradients over the batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backpack_core.contract.extension import Extension
from backpack_core.errors import UsageError
from backpack_firstorder import products  # noqa: F401 - registers its operations
from backpack_firstorder.scaled import wider
from backpack_firstorder.single import in_single
from backpack_firstorder.squares import SquaresExtension
from backpack_products import SampleProduct
from backpack_products.host_functions import HostFunction
from backpack_products.merging import OverBatches, Part
from backpack_products.operations import batch_sum, square_sum
from backpack_products.values import is_lost


class SumGradSquared(SquaresExtension):
    """Sum of the squared individual gradients, an uncentred second moment.

    Stored in ``sum_grad_squared``, shape ``[*θ]``: ``Σ_n (∇_θ ℓ_n)²`` elementwise for a sum, and
    ``1/N² Σ_n (∇_θ ℓ_n)²`` for a mean; at least in single precision.

    Linear layers do not form individual gradients (Dangel et al., 2020, BackPACK, ICLR, appendix
    A.1). Other layers form as many at a time as fit into the processor's cache.
    """

    savefield = "sum_grad_squared"
    degree = 2
    over_batches = "sum"
    needs = (square_sum,)

    def read(self, product: SampleProduct) -> Tensor:
        """``Σ_n M[n]²``."""
        return square_sum(in_single(product))


class _OfMoments(OverBatches):
    """How batches combine: variances alone are not enough, the means are needed, too."""

    def __init__(self) -> None:
        super().__init__({"": Part()})

    def reader(self, extension: Extension) -> Extension:
        """The extension that keeps both moments of each batch."""
        if extension.carriers:
            names = ", ".join(kind.__name__ for kind in extension.carriers)
            raise UsageError(
                f"{type(extension).__name__} has its own carriers for {names}, which compute the "
                "variance of one batch. Several batches need their means, too: leave the carriers "
                "out."
            )
        return Moments(extension.subsampling, extension.savefield, extension.fail_mode)


class Variance(SquaresExtension):
    """Variance of the individual gradients, elementwise.

    Stored in ``variance``, shape ``[*θ]``: ``1/N Σ_n g_n² - (1/N Σ_n g_n)²`` with the individual
    gradients ``g_n`` as they arrive, ``∇_θ ℓ_n`` for a sum and ``1/N ∇_θ ℓ_n`` for a mean, and the
    number ``N`` of samples that take part. It is not Bessel-corrected. At least in single
    precision. See Dangel et al. (2020), BackPACK, ICLR, section 2.2.

    Where gradients nearly agree, the difference loses digits. On the host, a check shows this, and
    both moments are computed in double precision: three digits are right if the standard deviation
    is above 10⁻⁶ of the mean, and no value is negative. On other devices, in captured steps, and if
    the value is differentiated, single precision gives three digits above 1/25 of the mean (of 128
    samples), and rounding may leave a negative number.
    """

    savefield = "variance"
    degree = 2
    over_batches = _OfMoments()
    needs = (batch_sum, square_sum)

    def read(self, product: SampleProduct) -> Tensor:
        """Second moment minus squared first moment."""
        return _variance(in_single(product))


def _variance(product: SampleProduct) -> Tensor:
    """Second moment minus squared first moment, in double precision where digits are lost."""
    samples = max(1, product.samples)  # without samples, zero
    total, squares = batch_sum(product).squeeze(0), square_sum(product) / samples
    found = torch.addcmul(squares, total, total, value=-1 / samples**2)
    looks = product.like.dtype is torch.float32 and unless_hidden.takes(found, squares, product)
    return unless_hidden(found, squares, product) if looks else found


@HostFunction
def unless_hidden(found: Tensor, squares: Tensor, product: SampleProduct) -> Tensor:
    """Variances, or those in double precision if rounding may hide some of them.

    Rounding of each moment grows with the root of the number of samples at most.
    """
    samples = max(1, product.samples)
    if not is_lost(found, squares, found.dtype, samples**0.5):
        return found
    product = product.in_dtype(torch.float64)
    product.needs = frozenset(Variance.needs)
    mean, squares = batch_sum(product).squeeze(0) / samples, square_sum(product) / samples
    return (squares - mean.square()).clamp(min=0).to(found.dtype)


class _Separate(OverBatches):
    """Uncentred moments that are averaged in double precision; the variance is formed at the end.

    So nothing is lost where the means of batches nearly agree.
    """

    def __init__(self) -> None:
        powers = {"mean": 1, "squares": 2}
        parts = {n: Part("mean", d, counts_unreached=True) for n, d in powers.items()}
        super().__init__({**parts, "like": Part("same", 0, counts_unreached=True)})

    def take_apart(self, value: Tensor) -> dict[str, Tensor]:
        """Both moments from ``[2, *θ]``, and a tensor with the dtype of the variance."""
        mean, variance = value.to(wider(value) or value.dtype)
        return {"mean": mean, "squares": variance + mean.square(), "like": value.new_empty(0)}

    def put_together(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        """``1/N Σ_n g_n² - (1/N Σ_n g_n)²``, not below zero."""
        variance = tensors["squares"] - tensors["mean"].square()
        return variance.clamp(min=0).to(tensors["like"].dtype)


class Moments(SquaresExtension):
    """Mean and variance of the individual gradients.

    Stored in ``gradient_moments``, shape ``[2, *θ]``: ``1/N Σ_n g_n`` and :class:`Variance`, which
    uses this extension to combine batches.
    """

    savefield = "gradient_moments"
    degree = 2
    over_batches = _Separate()
    needs = (batch_sum, square_sum)

    def read(self, product: SampleProduct) -> Tensor:
        """The sum over the batch divided by the number of samples, and the variance."""
        product = in_single(product)
        mean = batch_sum(product).squeeze(0) / max(1, product.samples)
        return torch.stack([mean, _variance(product)])
