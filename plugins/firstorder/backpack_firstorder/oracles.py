"""What this package's extensions compute, written plainly for the conformance kit to compare."""

from __future__ import annotations

import math
from hashlib import sha256

import torch
from torch import Tensor

from backpack_core.testing import Quantity, Reference, register_quantity
from backpack_core.testing.oracle import flat
from backpack_core.testing.quantities import directions, fixed_vectors


def _variance(reference: Reference, name: str) -> Tensor:
    """``1/N Σ_n g_n² - (1/N Σ_n g_n)²`` of the gradients as the loss scales them."""
    gradients = reference.gradients(name)
    return gradients.square().mean(0) - gradients.mean(0).square()


def _clipped(reference: Reference, name: str) -> Tensor:
    """The sum of gradients that are clipped to the norm 0.1 over all parameters."""
    squares = [flat(reference.gradients(p), 1).square().sum(1) for p in reference.parameters]
    factors = (0.1 / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
    return torch.einsum("n,n...->...", factors, reference.gradients(name))


def _projected(reference: Reference, name: str) -> Tensor:
    """``[N, 3]`` from signs that are hashes of their place, see ``ProjectedGrad``."""
    gradients, dim = flat(reference.gradients(name), 1), 3
    shape = reference.parameters[name].shape
    rows = shape[0] if shape else 1
    size = gradients.shape[1]
    text = f"1\0rademacher\0{name}\x000\x00{rows}\0{size // rows}\0{dim}\0matrix"
    key = int.from_bytes(sha256(text.encode()).digest()[:8], "little")
    signs = [1.0 - 2.0 * (_hashed(key, place) >> 63) for place in range(size * dim)]
    matrix = torch.tensor(signs, dtype=gradients.dtype).reshape(size, dim)
    return gradients @ matrix / math.sqrt(dim)


def _hashed(key: int, place: int) -> int:
    """Output number ``place`` of SplitMix64 (Steele et al., 2014) with a seed."""
    mask = (1 << 64) - 1
    mixed = (key + (place + 1) * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


def _aggregated(reference: Reference, name: str) -> Tensor:
    """The gradient of the only loss, times its norm over all parameters."""
    sums = {p: reference.gradients(p).sum(0) for p in reference.parameters}
    return sums[name] * torch.stack([total.square().sum() for total in sums.values()]).sum().sqrt()


def _row_sums(gram: Tensor) -> Tensor:
    """Weights of an aggregation."""
    return gram.sum(1) / gram.trace().sqrt()


_QUANTITIES = {
    "grad_batch": Quantity(lambda r, p: r.gradients(p)),
    "batch_l2": Quantity(lambda r, p: flat(r.gradients(p), 1).square().sum(1)),
    "sum_grad_squared": Quantity(lambda r, p: r.gradients(p).square().sum(0)),
    "variance": Quantity(_variance, cancels=True),
    "batch_dot": Quantity(lambda r, p: flat(r.gradients(p), 1) @ flat(r.gradients(p), 1).T),
    "grad_clipped": Quantity(_clipped, arguments={"max_norm": 0.1, "normaliser": None}),
    "grad_inner": Quantity(
        lambda r, p: flat(r.gradients(p), 1) @ flat(fixed_vectors(r, p), 1).T,
        arguments={"queries": directions},
    ),
    "projected_grad": Quantity(_projected, arguments={"dim": 3, "kind": "rademacher"}),
    "grad_task": Quantity(lambda r, p: r.gradients(p).sum(0, keepdim=True), cancels=True),
    "task_dot": Quantity(
        lambda r, p: r.gradients(p).sum(0).square().sum().reshape(1, 1), cancels=True
    ),
    "grad_aggregated": Quantity(_aggregated, cancels=True, arguments={"weighting": _row_sums}),
}
for _field, _quantity in _QUANTITIES.items():
    register_quantity(_field, _quantity)
