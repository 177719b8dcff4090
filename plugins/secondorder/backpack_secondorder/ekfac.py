"""Kronecker-factored curvature with corrected eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from backpack_core.contract.extension import Extension
from backpack_core.errors import ShapeError, UnsupportedError, UsageError
from backpack_products import SampleProduct
from backpack_products.extensions import as_subsampling
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.factors import (
    WeightSharing,
    corrected,
    corrected_eigenbasis,
    eigenvalues_in,
)
from backpack_secondorder.kfac import (
    KFAC,
    KFLR,
    MatrixExtension,
    StructureMode,
    as_weight_sharing,
    split_mode,
)
from backpack_secondorder.matrix import CurvatureMatrix
from backpack_secondorder.merging import OfEigenbasis
from backpack_secondorder.propagators import LossSqrt


class OfCorrected(OfEigenbasis):
    """How EKFAC combines over batches: the eigenvectors of all samples first, then eigenvalues."""

    def first_pass(self, extension: Extension) -> Extension | None:
        """The extension of the first pass, which computes factors; ``None`` if a basis is given."""
        assert isinstance(extension, EKFAC)
        assert isinstance(extension.propagator, LossSqrt)
        if extension.basis is not None:
            return None
        samples, sharing = extension.propagator.samples, extension.weight_sharing
        mode = extension.fallback or extension.fail_mode
        settings = extension.subsampling, extension.savefield, mode
        return KFLR(sharing, *settings) if samples is None else KFAC(samples, sharing, *settings)

    def second_pass(self, extension: Extension, known: Mapping[Tensor, Any]) -> Extension:
        """The extension of the second pass, which computes eigenvalues in the factors' basis."""
        assert isinstance(extension, EKFAC)
        assert isinstance(extension.propagator, LossSqrt)
        if extension.basis is not None:
            return extension
        return EKFAC(
            extension.propagator.samples,
            extension.weight_sharing,
            extension.subsampling,
            extension.savefield,
            extension.fallback or extension.fail_mode,
            basis={parameter: matrix.eigenbasis() for parameter, matrix in known.items()},
        )


class EKFAC(MatrixExtension):
    """Kronecker-factored curvature with corrected eigenvalues.

    Stored in ``ekfac``, a :class:`~backpack_secondorder.eigenbasis.KroneckerEigenbasis`. It has the
    eigenvectors of the factors of :class:`~backpack_secondorder.kfac.KFAC`. Instead of products of
    their eigenvalues, it has the diagonal of the generalised Gauss-Newton block in that basis,
    ``Σ_v Σ_n (Q_Bᵀ M[v, n] Q_A)²`` from the same columns, of shape ``[O, I]``. Of all matrices with
    these eigenvectors, it is the closest to the block in the Frobenius norm. For biases it is the
    block itself. It scales as the loss. George et al. (2018), arXiv:1806.03884.

    The eigenvectors of two batches differ, so their results cannot be added. With ``basis``, the
    eigenvectors are fixed, and only eigenvalues are computed. Then sums over batches are exact: a
    first pass over the data adds up the factors, and a second one the eigenvalues.
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
        fail_mode: StructureMode = "autodiff",
        basis: Mapping[Tensor, CurvatureMatrix] | None = None,
        tolerance: float = 0.0,
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
            fail_mode: For parameters without structure; see
                :class:`~backpack_secondorder.kfac.KFAC`.
            basis: A matrix with eigenvectors for each parameter (for example, Kronecker factors of
                a data set); default: those of the batch. Results share the memory of the
                eigenvectors.
            tolerance: Share of the trace of the exact loss Hessian that may be left out; see
                :class:`~backpack_secondorder.square_root.ExactExtension`.
        """
        samples = as_subsampling(subsampling)
        propagator = LossSqrt(samples=mc_samples, subsampling=samples, tolerance=tolerance)
        self.fallback, mode = split_mode(fail_mode)
        super().__init__(propagator, savefield, mode)
        self.weight_sharing = as_weight_sharing(weight_sharing)
        if basis is not None and not _is_basis(basis):
            raise UsageError(
                "basis must map parameters to matrices with eigenvectors, such as {p: "
                "factors[name] for name, p in model.named_parameters()}. Got "
                f"{basis!r:.80} of type {type(basis).__name__}."
            )
        self.basis = None if basis is None else {id(p): (p, m) for p, m in basis.items()}

    def read(self, product: SampleProduct) -> KroneckerEigenbasis:
        """The matrix: the basis with corrected eigenvalues.

        Raises:
            UsageError: The given basis has none for this parameter.
            UnsupportedError: The same, where ``fail_mode`` leaves such parameters out.
            ShapeError: The basis belongs to a parameter of another shape.
        """
        if self.basis is None:
            factors = self.factors(product, self.weight_sharing)
            if factors.structure != "kronecker":
                # The basis of the block, or of its diagonal.
                return factors.decomposed(product.is_measured).clone()
            return corrected_eigenbasis(product, self.weight_sharing).clone()
        basis = self._given(product)
        values = eigenvalues_in(product, basis.to(product.like.dtype))
        return corrected(basis, values.to(basis.dtype))

    def _given(self, product: SampleProduct) -> KroneckerEigenbasis:
        assert self.basis is not None
        # A module may use a tensor that is computed from the parameter, or from its shard.
        tensors = getattr(product.module, product.name, None), product.parameter
        entry = next((self.basis[id(t)] for t in tensors if id(t) in self.basis), None)
        if entry is None:
            is_left_out = self.fail_mode in ("silent", "warning")
            raise (UnsupportedError if is_left_out else UsageError)(
                f"EKFAC was given a basis without eigenvectors for the parameter {product.name!r} "
                f"of {product.path}: add Kronecker factors of it to the mapping, or freeze it."
            )
        basis = entry[1].eigenbasis()
        if basis.order.shape != product.shape:
            raise ShapeError(
                f"EKFAC was given eigenvectors for a parameter of shape {list(basis.order.shape)} "
                f"instead of {product.name!r} of {product.path}, which has "
                f"{list(product.shape)}."
            )
        return basis


def _is_basis(basis: Any) -> bool:
    return isinstance(basis, Mapping) and all(
        isinstance(key, Tensor) and isinstance(value, CurvatureMatrix)
        for key, value in basis.items()
    )
