"""Declarations of how curvature matrices of disjoint batches combine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from backpack_products.merging import OverBatches, Part
from backpack_secondorder.kronecker import matrix_of
from backpack_secondorder.matrix import CurvatureMatrix, ParameterOrder

_SAME = Part("same", 0)


class OfMatrix(OverBatches):
    """A matrix as the tensors of its ``state_dict``; the shape comes from the parameter."""

    def __init__(self) -> None:
        """Declare no parts, since the tensors depend on the value; see :meth:`part`."""
        super().__init__({})

    def part(self, name: str) -> Part:
        """How the tensor of a name combines."""
        return _SAME

    def take_apart(self, value: CurvatureMatrix) -> dict[str, Tensor]:
        """The tensors of :meth:`CurvatureMatrix.all_tensors`."""
        return value.all_tensors()

    def put_together(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> CurvatureMatrix:
        """The matrix from its tensors."""
        return matrix_of(tensors, ParameterOrder(shape, tensors.get("positions")))

    def plugins_of(self, value: CurvatureMatrix) -> Mapping[str, str]:
        """Those of the rule that returned the product."""
        return value.order.plugins

    def marked(self, value: CurvatureMatrix, plugins: Mapping[str, str]) -> CurvatureMatrix:
        """The same matrix, as if it had been saved with the fingerprint and loaded."""
        if not value.order.plugins:
            value.order = replace(value.order, saved=dict(plugins))
        return value


class OfFactors(OfMatrix):
    """``B`` is a sum over samples, with the scale of the loss; ``A`` is an average, without it.

    The weight of the averages is the sum of the samples' scales.
    """

    def part(self, name: str) -> Part:
        """A sum for the first factor and the weight, an average for other factors."""
        if name in ("factors.0", "weight"):
            return Part("sum", 1)
        return Part("mean", 0) if name.startswith("factors.") else _SAME


class OfAverages(OfFactors):
    """The same as :class:`OfFactors`, for factors that have the weight one for any batch."""

    def part(self, name: str) -> Part:
        """The same as for :class:`OfFactors`, except that weights must agree."""
        return _SAME if name == "weight" else super().part(name)


class OfEigenbasis(OfMatrix):
    """Eigenvalues are added; the eigenvectors must be the same for all batches."""

    def part(self, name: str) -> Part:
        """A sum for the eigenvalues; eigenvectors must agree."""
        return Part("sum", 1) if name == "values" else _SAME


OF_FACTORS, OF_AVERAGES = OfFactors(), OfAverages()
