"""Draws from categorical distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core.contract.contractions import slices
from backpack_core.tuning import CACHE, memory_budget


def drawn(p: Tensor, samples: int) -> Tensor:
    """Independent classes with probabilities ``p``, by inversion of the distribution function.

    It takes one uniform number for each draw, where ``torch.multinomial`` takes one for each class
    if there is a single draw, and sums up in double precision, so that rare classes get their
    share. Random numbers come from torch's default generator.

    Args:
        p: Shape ``[M, C]``. Rows need not add up to one; a class of probability zero is not drawn.
        samples: How many draws.

    Returns:
        Shape ``[M, samples]``. Some class where a probability is no number.
    """
    count, classes = p.shape
    is_cpu, dtype = p.device.type == "cpu", p.dtype if p.device.type == "mps" else torch.float64
    uniform = torch.rand(count, samples, dtype=dtype, device=p.device)
    result = torch.empty(count, samples, dtype=torch.int64, device=p.device)
    limit = min(CACHE, memory_budget()) if is_cpu else memory_budget()
    for rows in slices(count, limit // (dtype.itemsize * max(1, classes))):
        total = p[rows].cumsum(1, dtype=dtype)
        result[rows] = torch.searchsorted(total, uniform[rows] * total[:, -1:], right=True)
    return result.clamp_(max=classes - 1)
