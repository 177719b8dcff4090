"""How matrices in Kronecker form of disjoint batches combine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backpack_core.contract.merging import OverBatches, Part
from backpack_secondorder.kronecker import matrix_from_state
from backpack_secondorder.matrix import CurvatureMatrix

_SAME = Part("same", 0)
_SHAPE = "shape"


class OfMatrix(OverBatches):
    """A matrix as the tensors of its state; the shape is known of the parameter."""

    def __init__(self) -> None:
        """The tensors of a value depend on the parameter: see :meth:`part`."""
        super().__init__({})

    def part(self, name: str) -> Part:
        """How the tensor of a name combines."""
        return _SAME

    def take_apart(self, value: CurvatureMatrix) -> dict[str, Tensor]:
        """As :meth:`CurvatureMatrix.state_dict` has them."""
        return {name: t for name, t in value.state_dict().items() if name != _SHAPE}

    def put_together(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> CurvatureMatrix:
        """The matrix."""
        return matrix_from_state({**tensors, _SHAPE: torch.tensor(shape, dtype=torch.int64)})


class OfFactors(OfMatrix):
    """``B`` is a sum over samples, in the scale of the loss; ``A`` an average, without it.

    So is the weight that averages have in sums, a sum of the scales of samples.
    """

    def part(self, name: str) -> Part:
        """The first factor, the weight, and all others."""
        if name in ("factors.0", "weight"):
            return Part("sum", 1)
        return Part("mean", 0) if name.startswith("factors.") else _SAME


class OfAverages(OfFactors):
    """Factors that are averages all; their weight is one."""

    def part(self, name: str) -> Part:
        """As there, but for the weight."""
        return _SAME if name == "weight" else super().part(name)


class OfEigenbasis(OfMatrix):
    """Eigenvalues are added, for eigenvectors that are the same for all samples."""

    def part(self, name: str) -> Part:
        """The eigenvalues, and all others."""
        return Part("sum", 1) if name == "values" else _SAME


OF_FACTORS, OF_AVERAGES = OfFactors(), OfAverages()
