"""Moments of the individual gradients over the batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backpack_core.contract.extension import Extension
from backpack_core.errors import UsageError
from backpack_firstorder import products  # noqa: F401 - registers its operations
from backpack_firstorder.single import in_single
from backpack_firstorder.squares import SquaresExtension
from backpack_products import SampleProduct
from backpack_products.merging import OverBatches, Part
from backpack_products.operations import batch_sum, square_sum


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
    number ``N`` of samples that take part. It is not Bessel-corrected, and rounding may leave a
    small negative number where all gradients agree. At least in single precision. See Dangel et
    al. (2020), BackPACK, ICLR, section 2.2.
    """

    savefield = "variance"
    degree = 2
    over_batches = _OfMoments()
    needs = (batch_sum, square_sum)

    def read(self, product: SampleProduct) -> Tensor:
        """Second moment minus squared first moment."""
        samples, product = max(1, product.samples), in_single(product)  # without samples, zero
        total, squares = batch_sum(product).squeeze(0), square_sum(product)
        return torch.addcmul(squares / samples, total, total, value=-1 / samples**2)


class _Separate(OverBatches):
    """Both moments as tensors that are averaged; the variance is formed at the end."""

    def __init__(self) -> None:
        powers = {"mean": 1, "squares": 2}
        super().__init__({n: Part("mean", d, counts_unreached=True) for n, d in powers.items()})

    def take_apart(self, value: Tensor) -> dict[str, Tensor]:
        """Split ``[2, *θ]`` into both moments."""
        return {"mean": value[0], "squares": value[1]}

    def put_together(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
        """``1/N Σ_n g_n² - (1/N Σ_n g_n)²``."""
        return tensors["squares"] - tensors["mean"].square()


class Moments(SquaresExtension):
    """Mean and uncentred second moment of the individual gradients.

    Stored in ``gradient_moments``, shape ``[2, *θ]``: ``1/N Σ_n g_n`` and ``1/N Σ_n g_n²``, with
    ``g_n`` as in :class:`Variance`, which uses this extension to combine batches.
    """

    savefield = "gradient_moments"
    degree = 2
    over_batches = _Separate()
    needs = (batch_sum, square_sum)

    def read(self, product: SampleProduct) -> Tensor:
        """Sums over the batch, divided by the number of samples."""
        samples, product = max(1, product.samples), in_single(product)
        total, squares = batch_sum(product).squeeze(0), square_sum(product)
        return torch.stack([total, squares]) / samples
