"""Kronecker-factored curvature with corrected eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from backpack_core import SampleProduct, SecondOrderExtension
from backpack_core.contract.extension import Extension, FailMode, as_subsampling
from backpack_secondorder.factors import WeightSharing, correct, corrected_eigenbasis
from backpack_secondorder.kfac import KFAC, KFLR, MatrixExtension, as_weight_sharing
from backpack_secondorder.kronecker import KroneckerEigenbasis
from backpack_secondorder.merging import OfEigenbasis
from backpack_secondorder.propagators import LossSqrt


class OfCorrected(OfEigenbasis):
    """Eigenvectors are those of all samples, so corrected eigenvalues take a second pass."""

    def first_pass(self, extension: Extension) -> Extension:
        """The Kronecker factors."""
        assert isinstance(extension, EKFAC)
        assert isinstance(extension.propagator, LossSqrt)
        samples, sharing = extension.propagator.samples, extension.weight_sharing
        settings = extension.subsampling, extension.savefield, extension.fail_mode
        return KFLR(sharing, *settings) if samples is None else KFAC(samples, sharing, *settings)

    def second_pass(self, extension: Extension, known: Mapping[Tensor, Any]) -> Extension:
        """The eigenvalues for their eigenvectors."""
        assert isinstance(extension, EKFAC)
        return CorrectedEigenvalues(extension, known)


class EKFAC(MatrixExtension):
    """Kronecker-factored curvature with corrected eigenvalues.

    Stored in ``ekfac``, a :class:`~backpack_secondorder.kronecker.KroneckerEigenbasis`: the
    eigenvectors of the factors of :class:`~backpack_secondorder.kfac.KFAC`, and in place of
    products of their eigenvalues the diagonal of the generalised Gauss-Newton block in that basis,
    ``Σ_v Σ_n (Q_Bᵀ M[v, n] Q_A)²`` from the same columns, of shape ``[O, I]``. Of all matrices with
    these eigenvectors it is the closest to the block in the Frobenius norm. For biases it is the
    block itself. Scaled as the loss. George et al. (2018), arXiv:1806.03884.
    """

    savefield = "ekfac"
    degree = 1
    over_batches = OfCorrected()
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


class CorrectedEigenvalues(SecondOrderExtension):
    """The second pass of :class:`EKFAC` over batches: eigenvalues for eigenvectors that are known.

    Stored in the field of the other: a ``KroneckerEigenbasis`` with ``diag(Qᵀ G Q)`` of one batch.
    """

    degree = 1
    over_batches = OfEigenbasis()
    needs = (correct,)

    def __init__(self, first: EKFAC, known: Mapping[Tensor, Any]) -> None:
        """Decompose the factors.

        Args:
            first: What is computed.
            known: The Kronecker factors of all samples, for each parameter.
        """
        super().__init__(first.propagator, first.savefield, first.fail_mode)
        self._bases = {parameter: factors.eigenbasis() for parameter, factors in known.items()}

    def read(self, product: SampleProduct) -> SampleProduct:
        """Everything, since only who stores it knows the parameter."""
        return product

    def as_stored(self, value: Any, parameter: Tensor) -> KroneckerEigenbasis:
        """The eigenvalues."""
        basis = self._bases[parameter].to(value.like.dtype)
        corrected: KroneckerEigenbasis = correct(value, basis)
        return corrected.to(self.dtype_for(parameter)).clone()
