"""Individual gradients, and what is read off pairs of them."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core import FirstOrderExtension, SampleProduct
from backpack_core.contract.operations import dense, gram, squared_norm


class BatchGrad(FirstOrderExtension):
    """Individual gradients.

    Stored in ``grad_batch``, shape ``[N, *θ]``: the gradient of sample ``n``'s part of the loss,
    ``∇_θ ℓ_n`` for a sum and ``1/N ∇_θ ℓ_n`` for a mean, so that ``Σ_n grad_batch[n] = grad``.
    With ``subsampling``, only the chosen samples, scaled as in the whole batch.

    Exact for every net whose samples do not influence each other (Dangel et al., 2020, BackPACK,
    ICLR, section 2.2).
    """

    savefield = "grad_batch"
    needs = (dense,)

    def read(self, product: SampleProduct) -> Tensor:
        """The per-sample product itself."""
        return dense(product).squeeze(0)


class BatchL2Grad(FirstOrderExtension):
    """Squared Euclidean norms of the individual gradients.

    Stored in ``batch_l2``, shape ``[N]``: ``‖∇_θ ℓ_n‖²`` for a sum, and ``1/N² ‖∇_θ ℓ_n‖²`` for a
    mean. The norm of a gradient in several parameters follows from the sum over them. In single
    precision at least, whatever the parameters have.

    No individual gradient is formed for a layer whose positions share no weight (Goodfellow, 2015,
    arXiv:1510.01799), nor where Gram matrices over positions are cheaper (Li et al., 2022,
    arXiv:2110.05679, section 4).
    """

    savefield = "batch_l2"
    needs = (squared_norm,)

    def read(self, product: SampleProduct) -> Tensor:
        """A contraction per sample."""
        return squared_norm(product).squeeze(0)

    def dtype_for(self, parameter: Tensor) -> torch.dtype:
        """Squares leave the range of half precision."""
        return torch.promote_types(parameter.dtype, torch.float32)


class BatchDotGrad(FirstOrderExtension):
    """Inner products of all pairs of individual gradients.

    Stored in ``batch_dot``, shape ``[N, N]``: ``⟨∇_θ ℓ_n, ∇_θ ℓ_m⟩`` for a sum, and ``1/N²`` times
    that for a mean. Its diagonal is ``batch_l2``. Summed over parameters it is the Gram matrix of
    the gradients, an empirical neural tangent kernel contracted with the loss's gradients.

    Individual gradients are formed only where Gram matrices over positions would cost more.
    """

    savefield = "batch_dot"
    needs = (gram,)

    def read(self, product: SampleProduct) -> Tensor:
        """A Gram matrix over samples."""
        return gram(product)[0, :, 0]
