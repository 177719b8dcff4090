"""Readings at the leaves that a module's parameter was computed from, by a parametrization.

The layer rule knows the computed tensor only, but results belong on the leaves.
"""

from __future__ import annotations

from torch import Tensor

from backpack_interplay.leaves import pull_back
from backpack_products.product import DenseProduct, Reading, SampleProduct


class ComputedProduct(SampleProduct):
    """``Jᵀ M``: the product of a leaf, with ``M`` the product of what was computed from it."""

    def __init__(self, product: SampleProduct, source: Tensor, leaf: Tensor) -> None:
        """Store the product of the computed tensor ``source``."""
        super().__init__(product.columns, product.samples, leaf.shape, product.like)
        self.roots = product.roots
        self._product = product
        self._source = source
        self._leaf = leaf

    def part(self, columns: slice, samples: slice) -> Tensor:
        """Pulled back through the graph of the computation, for all columns and samples at once."""
        mat = self._product.part(columns, samples)
        pulled = pull_back(mat.flatten(0, 1), self._source, self._leaf)
        product: Tensor = pulled.unflatten(0, mat.shape[:2])
        return product

    def lasting(self) -> SampleProduct:
        """The formed product: the graph of the computation goes with the pass."""
        values = self.part(slice(0, self.columns), slice(0, self.samples))
        return DenseProduct(values).placed_as(self)


def at_leaf(reading: Reading, source: Tensor, leaf: Tensor) -> Reading:
    """The reading at a leaf, from that of the parameter ``source`` that was computed from it.

    Raises:
        UnsupportedError: It exists at the computed parameter only.
    """
    if not isinstance(reading, SampleProduct):
        found: Reading = reading.at_leaf(source, leaf)
        return found.placed_as(reading)
    return ComputedProduct(reading, source, leaf).placed_as(reading)
