"""Moments of the individual gradients over the batch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from backpack_core.contract.extension import Extension
from backpack_core.errors import UsageError
from backpack_firstorder import products  # noqa: F401 - registers its operations
from backpack_firstorder.scaled import wider
from backpack_firstorder.single import in_single
from backpack_firstorder.squares import SquaresExtension
from backpack_products import SampleProduct
from backpack_products.affine import AffineProduct
from backpack_products.host_functions import HostFunction
from backpack_products.merging import OverBatches, Part
from backpack_products.operations import as_formed, batch_sum, is_formed, square_sum
from backpack_products.recycled import take
from backpack_products.rows import Rows
from backpack_products.scale import ScaleProduct
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
    is above 10⁻⁶ of the mean, and no value is negative. Over several batches, it must be above 10⁻⁴
    of the mean. On other devices, if the value is differentiated, and for tables of embeddings and
    parameters that are used in several forms, it must be above 1/30 of the mean (of 128 samples),
    and rounding may leave a negative number.
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
    total, squares = batch_sum(product).squeeze(0), square_sum(product)
    factors = _factors(product) if product.like.dtype is torch.float32 else None
    if factors is not None and looked_at.takes(total, squares, *factors):
        return looked_at(total, squares, *factors)
    return _difference(total, squares, product.samples)


def _difference(total: Tensor, squares: Tensor, samples: int) -> Tensor:
    samples = max(1, samples)  # without samples, zero
    found = torch.div(squares, samples, out=take(squares, squares.shape))
    return found.addcmul_(total, total, value=-1 / samples**2)


def _factors(product: SampleProduct) -> tuple[Tensor, Rows] | None:
    """Factors in the parameter's own order, those of offsets and gains with inputs of one."""
    if type(product) is AffineProduct and product.arrange is None:
        if product.inp is not None:
            return product.factors(product.inp)
        out = product.out
    elif isinstance(product, ScaleProduct) or is_formed(product):
        out = as_formed(product).part(slice(0, 1), slice(0, product.samples))
        out = out.reshape(1, product.samples, 1, 1, prod(product.shape))
    else:
        return None
    return out, out.new_ones(()).expand(*out.shape[1:4], 1)


@HostFunction
def looked_at(total: Tensor, squares: Tensor, out: Tensor, inp: Rows) -> Tensor:
    """Variances from sums and sums of squares, or in double precision if rounding may hide some.

    Rounding of the sums grows with the root of the number of samples at most.
    """
    samples = out.shape[1]
    found = _difference(total, squares, samples)
    if not is_lost(found, squares, found.dtype, max(1, samples) ** -0.5):
        return found
    product = AffineProduct(out, inp, total.shape).in_dtype(torch.float64)
    product.needs = frozenset(Variance.needs)
    exact = _difference(batch_sum(product).squeeze(0), square_sum(product), samples)
    return exact.clamp(min=0).to(found.dtype)


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
