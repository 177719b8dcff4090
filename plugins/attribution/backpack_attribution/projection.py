from __future__ import annotations

import hashlib

import torch

from backpack_products import FirstOrderExtension
from backpack_products.operations import dense


class ProjectedGrad(FirstOrderExtension):
    savefield = "projected_grad"
    needs = (dense,)

    def __init__(self, dim, kind="kronecker", seed=0):
        super().__init__()
        self.dim, self.seed = dim, seed

    def read(self, product):
        g = dense(product).squeeze(0).flatten(1)
        name = f"{product.path} {product.name}"
        s = int.from_bytes(hashlib.sha256(f"{name}|{self.seed}".encode()).digest()[:7], "little")
        gen = torch.Generator().manual_seed(s)
        p = (
            torch.randn(g.shape[1], self.dim, generator=gen, dtype=torch.float32).to(g.dtype)
            / self.dim**0.5
        )
        return g @ p
