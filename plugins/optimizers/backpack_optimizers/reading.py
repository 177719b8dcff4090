"""Extensions that read only at some parameters; the others step by AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from backpack_core import Extension
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import EKFAC, KFAC, KFLR
from backpack_products import FirstOrderExtension, LookupProduct, SampleProduct
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.matrix import CurvatureMatrix


class _FactorsOfSome:
    """Reads Kronecker factors of chosen parameters, if no factor is larger than a bound."""

    chosen: frozenset[int]
    max_size: int

    def read(self, product: SampleProduct) -> KroneckerFactors:
        """The factors.

        Raises:
            UnsupportedError: The parameter was not chosen; it is left out.
        """
        parameter = getattr(product.module, product.name, None)
        if parameter is not None and id(parameter) not in self.chosen:
            raise UnsupportedError("The parameter steps by AdamW.")
        rows = product.shape[0] if product.shape else 1
        columns = product.shape.numel() // max(rows, 1)
        sizes = [columns] if isinstance(product, LookupProduct) else [rows, columns]
        if max(sizes) > self.max_size:
            raise UnsupportedError(f"A factor would be larger than {self.max_size}.")
        found: KroneckerFactors = super().read(product)  # type: ignore[misc]
        return found


class SampledFactors(_FactorsOfSome, KFAC):  # type: ignore[misc]
    """With a sampled Hessian of the loss."""


class ExactFactors(_FactorsOfSome, KFLR):  # type: ignore[misc]
    """With the exact Hessian of the loss."""


def factors_of_some(
    chosen: frozenset[int], max_size: int, mc_samples: int | None, weight_sharing: str, field: str
) -> Extension:
    """The extension that reads Kronecker factors at some parameters, and leaves the others out.

    Args:
        chosen: Identities of these parameters.
        max_size: The largest size of a factor that is not a diagonal.
        mc_samples: Targets drawn for each sample; ``None`` for the exact Hessian of the loss.
        weight_sharing: As for :class:`~backpack_core.extensions.KFAC`.
        field: Name of the attribute on parameters.
    """
    settings: dict[str, Any] = {"weight_sharing": weight_sharing, "savefield": field}
    settings["fail_mode"] = "silent"
    found = (
        ExactFactors(**settings) if mc_samples is None else SampledFactors(mc_samples, **settings)
    )
    found.chosen, found.max_size = chosen, max_size
    return found


class Nothing(FirstOrderExtension):
    """Reads nothing, for passes that are only observed for what losses divide by."""

    savefield = "optimizer_nothing"

    def __init__(self) -> None:
        """Leave all parameters out, silently."""
        super().__init__(fail_mode="silent")

    def read(self, product: SampleProduct) -> Any:
        """Leave the parameter out.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("Nothing is read.")


class EigenvaluesOfSome(EKFAC):  # type: ignore[misc]
    """Corrected eigenvalues of the parameters that have eigenvectors."""

    def __init__(
        self,
        basis: Mapping[Tensor, CurvatureMatrix],
        mc_samples: int | None,
        weight_sharing: str,
        field: str,
    ) -> None:
        """Store the settings.

        Args:
            basis: The eigenvectors.
            mc_samples: As for :func:`factors_of_some`.
            weight_sharing: As there.
            field: As there.
        """
        super().__init__(
            mc_samples, weight_sharing, savefield=field, fail_mode="silent", basis=basis
        )

    def read(self, product: SampleProduct) -> KroneckerEigenbasis:
        """The eigenvalues.

        Raises:
            UnsupportedError: The parameter has no eigenvectors; it is left out.
        """
        known = self.basis or {}
        if id(getattr(product.module, product.name, None)) not in known:
            raise UnsupportedError("The parameter has no eigenvectors.")
        found: KroneckerEigenbasis = super().read(product)
        return found
