"""Kronecker-factored curvature with corrected eigenvalues."""

from __future__ import annotations

from collections.abc import Sequence

from backpack_core import SampleProduct
from backpack_core.contract.extension import FailMode, as_subsampling
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.factors import WeightSharing, corrected_eigenbasis
from backpack_secondorder.kfac import MatrixExtension, as_weight_sharing
from backpack_secondorder.propagators import LossSqrt


class EKFAC(MatrixExtension):
    """Kronecker-factored curvature with corrected eigenvalues.

    Stored in ``ekfac``, a :class:`~backpack_secondorder.eigenbasis.KroneckerEigenbasis`: the
    eigenvectors of the factors of :class:`~backpack_secondorder.kfac.KFAC`, and in place of
    products of their eigenvalues the diagonal of the generalised Gauss-Newton block in that basis,
    ``Σ_v Σ_n (Q_Bᵀ M[v, n] Q_A)²`` from the same columns, of shape ``[O, I]``. Of all matrices with
    these eigenvectors it is the closest to the block in the Frobenius norm. For biases it is the
    block itself. Scaled as the loss. George et al. (2018), arXiv:1806.03884.
    """

    savefield = "ekfac"
    needs = (corrected_eigenbasis,)

    def __init__(
        self,
        mc_samples: int | None = 1,
        weight_sharing: WeightSharing = "kfc",
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            mc_samples: Number of samples from the model's likelihood for each datum; ``None`` for
                the exact loss Hessian.
            weight_sharing: How positions enter the factors; see
                :class:`~backpack_secondorder.kfac.KFAC`. The corrected eigenvalues are exact for
                all.
            subsampling: Indices of the samples to take; default: all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: ``"warning"`` and ``"silent"`` leave out parameters without structure.
        """
        propagator = LossSqrt(samples=mc_samples, subsampling=as_subsampling(subsampling))
        super().__init__(propagator, savefield, fail_mode)
        self.weight_sharing = as_weight_sharing(weight_sharing)

    def read(self, product: SampleProduct) -> KroneckerEigenbasis:
        """The basis and its eigenvalues."""
        return corrected_eigenbasis(product, self.weight_sharing).clone()
