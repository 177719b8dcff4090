"""Random projections of individual gradients."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.operations import dense


class ProjectedGrad(FirstOrderExtension):
    """Individual gradients times a random matrix, ``[N, dim]``, named by parameter and seed."""

    savefield = "projected_grad"
    degree = 1
    over_batches = "concatenate"
    needs = (dense,)

    def __init__(self, dim: int, kind: str = "gaussian", seed: int = 0) -> None:
        """Store the settings."""
        super().__init__()
        self.dim, self.kind, self.seed = dim, kind, seed

    def read(self, product: SampleProduct) -> Tensor:
        """The projections."""
        gradients = dense(product).squeeze(0).flatten(1)
        name = f"{product.path} {product.name} {self.seed}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        matrix = torch.randn(
            gradients.shape[1],
            self.dim,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float32,
        )
        found: Tensor = gradients @ matrix.to(gradients) / self.dim**0.5
        return found
