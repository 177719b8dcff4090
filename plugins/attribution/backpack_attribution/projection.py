"""Random projections of individual gradients."""

from __future__ import annotations

import hashlib
from math import isqrt

import torch
from torch import Tensor

from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.operations import dense


class ProjectedGrad(FirstOrderExtension):
    """Individual gradients times a random matrix, ``[N, dim]``; inner products are kept on average.

    The matrix depends on the parameter's name, ``kind``, ``dim`` and ``seed`` alone.
    """

    savefield = "projected_grad"
    degree = 1
    over_batches = "concatenate"
    needs = (dense,)

    def __init__(self, dim: int, kind: str = "kronecker", seed: int = 0) -> None:
        """Store the settings.

        Args:
            dim: How many numbers.
            kind: ``"kronecker"``, ``"gaussian"``, ``"rademacher"`` or ``"sparse"``.
            seed: Of the matrix.
        """
        super().__init__()
        self.dim, self.kind, self.seed = dim, kind, seed

    def read(self, product: SampleProduct) -> Tensor:
        """The projections."""
        gradients = dense(product).squeeze(0)
        name = f"{product.path} {product.name} {self.kind} {self.dim} {self.seed}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "kronecker" and gradients.dim() > 2:
            # Two factors of signs, the larger one for the columns.
            first = max(d for d in range(1, isqrt(self.dim) + 1) if self.dim % d == 0)
            matrices = gradients.flatten(2)
            left = _signs(matrices.shape[1], first, generator).to(gradients)
            right = _signs(matrices.shape[2], self.dim // first, generator).to(gradients)
            found: Tensor = (left.T @ matrices @ right).flatten(1) / self.dim**0.5
            return found
        flat = gradients.flatten(1)
        projected: Tensor = flat @ self._matrix(flat.shape[1], generator).to(gradients)
        return projected

    def _matrix(self, size: int, generator: torch.Generator) -> Tensor:
        if self.kind == "sparse":
            places = torch.randint(self.dim, (size, 1), generator=generator)
            matrix = torch.zeros(size, self.dim, dtype=torch.float32)
            return matrix.scatter(1, places, _signs(size, 1, generator))
        found: Tensor = _signs(size, self.dim, generator)
        if self.kind == "gaussian":
            found = torch.randn(found.shape, generator=generator, dtype=torch.float32)
        scaled: Tensor = found / self.dim**0.5
        return scaled


def _signs(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    signs: Tensor = 2.0 * torch.randint(2, (rows, columns), generator=generator).float() - 1
    return signs
