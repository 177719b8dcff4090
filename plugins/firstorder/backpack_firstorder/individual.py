"""Individual gradients, their norms and their inner products."""

from __future__ import annotations

from torch import Tensor

from backpack_firstorder.products import norm
from backpack_firstorder.single import in_single
from backpack_firstorder.squares import SquaresExtension, warn_of_range
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.merging import SUM
from backpack_products.operations import dense, gram, squared_norm


class BatchGrad(FirstOrderExtension):
    """Individual gradients.

    Stored in ``grad_batch``, shape ``[N, *θ]``: the gradient of sample ``n``'s part of the loss,
    ``∇_θ ℓ_n`` for a sum and ``1/N ∇_θ ℓ_n`` for a mean, so that ``Σ_n grad_batch[n] = grad``.
    With ``subsampling``, it has only the chosen samples, scaled as in the whole batch.

    Exact for every net whose samples do not influence each other (Dangel et al., 2020, BackPACK,
    ICLR, section 2.2).
    """

    savefield = "grad_batch"
    degree = 1
    over_batches = "concatenate"
    needs = (dense,)

    def read(self, product: SampleProduct) -> Tensor:
        """``M`` itself, of one column."""
        return dense(product).squeeze(0)


class BatchL2Grad(SquaresExtension):
    """Squared Euclidean norms of the individual gradients.

    Stored in ``batch_l2``, shape ``[N]``: ``‖∇_θ ℓ_n‖²`` for a sum, and ``1/N² ‖∇_θ ℓ_n‖²`` for a
    mean. The squared norm over several parameters is the sum of theirs.

    In single precision at least. Where that is not enough, as for norms beyond 10¹⁹ or below
    10⁻¹⁹, a :class:`~backpack_core.errors.RangeWarning` says so once, in a pass that is measured.

    Individual gradients are not formed for a layer whose positions share no weight (Goodfellow,
    2015, arXiv:1510.01799), or if Gram matrices over positions are cheaper (Li et al., 2022,
    arXiv:2110.05679, section 4).
    """

    savefield = "batch_l2"
    degree = 2
    over_batches = "concatenate"
    needs = (squared_norm,)

    def read(self, product: SampleProduct) -> Tensor:
        """``‖M[n]‖²``."""
        single = in_single(product)
        found = norm(single)
        squares = found.squared().to(single.like.dtype)
        # What is out of range shows: it is infinite, or as near to zero as numbers get. So that may
        # be said where the pass looks at values anyway.
        if product.is_measured:
            self._warn(product, found.value(), squares)
        return squares.squeeze(0)

    def _warn(self, product: SampleProduct, norms: Tensor, squares: Tensor) -> None:
        message = (
            f"{self.savefield} of {product.name!r} of {product.path} leaves the range of "
            f"{squares.dtype}: norms of individual gradients are so large, or so small, that their "
            "squares are infinite, or zero. Scale the loss, or use double precision."
        )
        warn_of_range(norms, squares, (type(self), self.savefield), message)


class BatchDotGrad(SquaresExtension):
    """Inner products of all pairs of individual gradients.

    Stored in ``batch_dot``, shape ``[N, N]``: ``⟨∇_θ ℓ_n, ∇_θ ℓ_m⟩`` for a sum, and ``1/N²`` times
    that for a mean. Its diagonal is ``batch_l2``. Summed over parameters it is the Gram matrix of
    the gradients, an empirical neural tangent kernel contracted with the loss's gradients.

    In single precision at least. Individual gradients are formed only if Gram matrices over
    positions would cost more.
    """

    savefield = "batch_dot"
    degree = 2
    over_batches = SUM.refused(
        "an inner product of samples of two batches is in neither batch's matrix: take BatchGrad, "
        "which combines, and multiply the individual gradients."
    )
    needs = (gram,)

    def read(self, product: SampleProduct) -> Tensor:
        """``⟨M[n], M[m]⟩``."""
        return gram(in_single(product))[0, :, 0]
