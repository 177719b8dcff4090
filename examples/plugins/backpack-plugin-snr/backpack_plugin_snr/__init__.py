"""The signal-to-noise ratio of the gradient."""

from __future__ import annotations

from backpack_core.errors import UnsupportedError
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.operations import batch_sum, square_sum
from torch import Tensor


class SNR(FirstOrderExtension):
    """Signal-to-noise ratio of the individual gradients, elementwise.

    Stored in ``snr``, shape ``[*θ]``: ``m² / (s - m²)`` with the mean ``m = 1/N Σ_n g_n`` and the
    second moment ``s = 1/N Σ_n g_n²`` of the gradients ``g_n`` (squared mean over variance; Balles
    and Hennig, 2018, arXiv:1705.07774, section 2). The scale of the loss cancels. The ratio is
    infinite if all gradients agree, and zero if all of them vanish.
    """

    savefield = "snr"
    needs = (batch_sum, square_sum)

    def read(self, product: SampleProduct) -> Tensor:
        """From two contractions, which are computed once for all extensions that share them.

        Raises:
            UnsupportedError: A single sample has no variance.
        """
        samples = product.samples
        if samples < 2:
            raise UnsupportedError(
                f"{product.path} saw a single sample, which has no variance: SNR needs two or more."
            )
        signal = (batch_sum(product).squeeze(0) / samples).square()
        # Rounding may leave the difference below zero.
        noise = (square_sum(product) / samples - signal).clamp_min(0)
        return (signal / noise).where(signal > 0, signal)
