"""EKFAC: K-FAC with corrected eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backpack_core import Extension
from backpack_core.autocast import without_autocast
from backpack_optimizers.factored import FIELD, FactoredOptimizer
from backpack_optimizers.passes import Factors
from backpack_optimizers.processes import eigenbasis_form, inverted
from backpack_optimizers.reading import EigenvaluesOfSome
from backpack_optimizers.values import decay_at, fold
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.kronecker import KroneckerFactors

CORRECTED = "optimizer_eigenvalues"


class EKFAC(FactoredOptimizer):
    """EKFAC (George et al., 2018, arXiv:1806.03884).

    Every ``inverses_every`` steps, the eigenvectors ``Q`` of the averaged Kronecker factors are
    computed. In between, the eigenvalues are averages of the diagonal of the curvature in that
    basis, which :class:`backpack_core.extensions.EKFAC` computes for every batch:
    ``Q (diag(λ) + damping · I)⁻¹ Qᵀ g`` is exact damping, which takes effect at once. When the
    basis changes, the average is converted: it becomes the diagonal of ``Q diag(λ) Qᵀ`` in the new
    basis. The first eigenvalues are those of the factors.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Store the settings.

        Args:
            args: As for :class:`FactoredOptimizer`: model, parameters, rate, damping, ....
            settings: As there.
        """
        self._bases: dict[Tensor, KroneckerEigenbasis] = {}
        self._placed: dict[Tensor, KroneckerEigenbasis] = {}
        super().__init__(*args, **settings)

    def _tables(self) -> dict[str, dict[Tensor, Any]]:
        return {"factors": self._averages, "bases": self._bases}

    def _extensions(self) -> Sequence[Extension]:
        extensions = super()._extensions()
        if self.steps % self._factors_every or not self._placed:
            return extensions
        chosen = {*self._all("curvature")}
        bases = {p: basis for p, basis in self._placed.items() if p in chosen}
        return [*extensions, EigenvaluesOfSome(bases, field=CORRECTED, **self._reading)]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See the base class."""
        super().load_state_dict(state_dict)
        self._place()

    def _place(self) -> None:
        """Copy new vectors into the memory of the old ones, where captured steps find them."""
        known = self._placed
        self._placed = {p: copied(basis, known.get(p)) for p, basis in self._bases.items()}

    def _fold(self, found: Mapping[str, Factors]) -> None:
        fold(found.get(FIELD, {}), self._averages, self._counts, self._most)
        for parameter, new in found.get(CORRECTED, {}).items():
            assert isinstance(new, KroneckerEigenbasis)
            before = self._bases[parameter]
            # The first corrected values replace those of the factors.
            decay = decay_at(self._counts[parameter] - 1, self._most)
            values = decay * before.values + (1 - decay) * new.values
            self._bases[parameter] = before.with_values(values)

    def _invert(self, averages: Mapping[Tensor, KroneckerFactors]) -> None:
        new = inverted(averages, lambda factors: factors.eigenbasis(), eigenbasis_form, self._group)
        for parameter, basis in new.items():
            assert isinstance(basis, KroneckerEigenbasis)
            before = self._bases.get(parameter)
            self._bases[parameter] = basis if before is None else turned(before, basis)
        if new:
            self._place()

    def _solved(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        basis = self._bases.get(parameter)
        if basis is None:
            return None
        return (basis.inverse(self.damping) @ gradient.to(basis.dtype)).to(parameter.dtype)

    def _times(self, parameter: Tensor, vector: Tensor) -> Tensor:
        basis = self._bases.get(parameter)
        if basis is None:
            return torch.zeros_like(vector)
        return (basis @ vector.to(basis.dtype)).to(vector.dtype)


def copied(basis: KroneckerEigenbasis, into: KroneckerEigenbasis | None) -> KroneckerEigenbasis:
    """A copy of the vectors, in the memory of a matrix with vectors of the same form."""
    if into is None or _forms(into) != _forms(basis):
        vectors = [None if v is None else v.clone() for v in basis.vectors]
        return KroneckerEigenbasis(vectors, basis.values, basis.order)
    for old, new in zip(into.vectors, basis.vectors, strict=True):
        if old is not None and new is not None:
            old.copy_(new)
    return into


def _forms(basis: KroneckerEigenbasis) -> list[Any]:
    return [v if v is None else (v.shape, v.dtype, v.device) for v in basis.vectors]


def turned(before: KroneckerEigenbasis, basis: KroneckerEigenbasis) -> KroneckerEigenbasis:
    """A matrix in another basis, by its diagonal there: ``λ'_i = Σ_j (Q'ᵀ Q)²_ij λ_j``."""
    values = before.values
    count = len(before.vectors)
    for place, (old, new) in enumerate(zip(before.vectors, basis.vectors, strict=True)):
        if old is None or new is None:
            continue  # both are the identity: a factor is diagonal in all batches, or in none
        axis = values.dim() - count + place
        last = values.movedim(axis, -1)
        flat = last.flatten(-count, -2) if count > 1 else last.unsqueeze(-2)
        with without_autocast():
            moved = flat @ (new.mT @ old).square().mT
        values = moved.reshape(last.shape).movedim(-1, axis)
    return basis.with_values(values)
