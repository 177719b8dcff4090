"""How matrices in Kronecker form of disjoint batches combine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from backpack_core.contract.merging import OverBatches, Part
from backpack_core.errors import UnsupportedError
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.matrix import ParameterOrder

POSITIONS = "positions"
_SAME = Part("same", 0)


class InOrder(OverBatches):
    """A matrix with the order in which it numbers the entries of a parameter."""

    def __init__(self) -> None:
        """The tensors of a value depend on the parameter: see :meth:`part`."""
        super().__init__({})

    def part(self, name: str) -> Part:
        """How the tensor of a name combines."""
        return _SAME


def _with_order(tensors: dict[str, Tensor], order: ParameterOrder) -> dict[str, Tensor]:
    if order.positions is not None:
        tensors[POSITIONS] = order.positions
    return tensors


def _order(tensors: Mapping[str, Tensor], shape: torch.Size) -> ParameterOrder:
    return ParameterOrder(shape, tensors.get(POSITIONS))


def _numbered(tensors: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    names = [name for name in tensors if name.startswith(prefix)]
    return [tensors[name] for name in sorted(names, key=lambda name: int(name[len(prefix) :]))]


class OfFactors(InOrder):
    """``B`` is a sum over samples, in the scale of the loss; ``A`` an average, without it."""

    def part(self, name: str) -> Part:
        """The first factor, and all others."""
        if name == POSITIONS:
            return _SAME
        return Part("sum", 1) if name == "factor0" else Part("mean", 0)

    def take_apart(self, value: KroneckerFactors) -> dict[str, Tensor]:
        """``factor0``, ``factor1``, ..., and ``positions`` where the order is not the usual one."""
        return _with_order({f"factor{k}": f for k, f in enumerate(value)}, value.order)

    def put_together(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Any:
        """The factors."""
        return KroneckerFactors(_numbered(tensors, "factor"), _order(tensors, shape))


class OfEigenbasis(InOrder):
    """Eigenvalues are added, for eigenvectors that are the same for all samples."""

    def part(self, name: str) -> Part:
        """The eigenvalues, and all others."""
        return Part("sum", 1) if name == "values" else _SAME

    def take_apart(self, value: KroneckerEigenbasis) -> dict[str, Tensor]:
        """``values``, ``vectors0``, ``vectors1``, ..., and ``positions``."""
        tensors = {"values": value.values}
        for k, vectors in enumerate(value.vectors):
            if vectors is None:
                raise UnsupportedError(
                    "A factor of these eigenvectors is the identity, and has no tensor: combine "
                    "the matrices that they are of."
                )
            tensors[f"vectors{k}"] = vectors
        return _with_order(tensors, value.order)

    def put_together(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Any:
        """The matrix."""
        order = _order(tensors, shape)
        return KroneckerEigenbasis(_numbered(tensors, "vectors"), tensors["values"], order)


OF_FACTORS = OfFactors()
