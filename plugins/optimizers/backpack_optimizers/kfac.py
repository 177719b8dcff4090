"""K-FAC: natural-gradient steps by inverses of Kronecker factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from backpack_core.errors import UsageError
from backpack_optimizers.factored import FIELD, FactoredOptimizer
from backpack_optimizers.passes import Factors
from backpack_optimizers.processes import eigenbasis_form, inverted
from backpack_optimizers.values import fold
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.matrix import CurvatureMatrix

Split: TypeAlias = Literal["pi", "equal", "exact"]


class KFAC(FactoredOptimizer):
    """K-FAC (Martens and Grosse, 2015, arXiv:1503.05671; Grosse and Martens, 2016).

    The curvature of a weight is ``B ⊗ A``, that of a vector its block; factors are averaged over
    steps. A step is ``-lr · (F + damping · I)⁻¹ g``, and ``split`` says how factors are damped:

    - ``"pi"``: ``(B + √damping / π · I) ⊗ (A + √damping · π · I)``, with ``π²`` the ratio of mean
      diagonals (section 6.3 there), by Cholesky decompositions;
    - ``"equal"``: the same with ``π = 1``;
    - ``"exact"``: ``B ⊗ A + damping · I``, by eigendecompositions.

    A change of damping takes effect with the next inverses; with ``"exact"``, at once.

    Example:
        >>> optimizer = KFAC(model, lr=0.1, damping=1e-2)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     loss = lossfunc(model(x), y)
        ...     with optimizer.curvature():
        ...         loss.backward()
        ...     optimizer.step()
    """

    def __init__(self, *args: Any, split: Split = "pi", **settings: Any) -> None:
        """Store the settings.

        Args:
            args: As for :class:`FactoredOptimizer`: model, parameters, rate, damping, ....
            split: How the damping is split among factors; see the class.
            settings: As there.

        Raises:
            UsageError: A setting is out of range.
        """
        if split not in get_args(Split):
            raise UsageError(f"split must be one of {get_args(Split)}. Got {split!r}.")
        super().__init__(*args, **settings)
        self._split = split
        self._inverses: dict[Tensor, CurvatureMatrix] = {}

    def _tables(self) -> dict[str, dict[Tensor, Any]]:
        return {"factors": self._averages, "inverses": self._inverses}

    def _fold(self, found: Mapping[str, Factors]) -> None:
        fold(found.get(FIELD, {}), self._averages, self._counts, self._most)

    def _invert(self, averages: Mapping[Tensor, KroneckerFactors]) -> None:
        def inverse(factors: KroneckerFactors) -> CurvatureMatrix:
            if self._split == "exact":
                return factors.eigenbasis()
            return factors.inverse(self.damping, balanced=self._split == "pi")

        form = eigenbasis_form if self._split == "exact" else lambda factors: factors
        self._inverses.update(inverted(averages, inverse, form, self._group))

    def _solved(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        inverse = self._inverses.get(parameter)
        if inverse is None:
            return None
        if isinstance(inverse, KroneckerEigenbasis):
            inverse = inverse.inverse(self.damping)
        return (inverse @ gradient.to(inverse.dtype)).to(parameter.dtype)

    def _times(self, parameter: Tensor, vector: Tensor) -> Tensor:
        factors = self._averages.get(parameter)
        if factors is None:
            return torch.zeros_like(vector)
        return (factors @ vector.to(factors.dtype)).to(vector.dtype)
