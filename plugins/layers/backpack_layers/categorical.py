"""Draws from categorical distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_products.contractions import slices
from backpack_products.tuning import CACHE, memory_budget


def drawn(p: Tensor, samples: int) -> Tensor:
    """Independent classes with probabilities ``p``.

    On a CPU, the draws invert the distribution function (Devroye, 1986, Non-Uniform Random Variate
    Generation, section III.2). That takes one uniform number per draw; for a single draw,
    ``torch.multinomial`` takes one per class. Sums are in double precision, so that rare classes
    get their share. Other devices use ``torch.multinomial``: they make random numbers in parallel,
    and their sums along an axis are not always deterministic. Random numbers come from torch's
    default generator.

    Args:
        p: Shape ``[M, C]``. Rows need not add up to one; a class of probability zero is not drawn.
        samples: How many draws.

    Returns:
        Shape ``[M, samples]``; some class where a probability is not a number.
    """
    if p.device.type != "cpu":
        # On a device, NaN probabilities abort the process, and a check would have to wait.
        known = p.isfinite().all(1, keepdim=True)
        return torch.multinomial(p.where(known, torch.ones_like(p)), samples, replacement=True)
    count, classes = p.shape
    uniform = torch.rand(count, samples, dtype=torch.float64, device=p.device)
    result = torch.empty(count, samples, dtype=torch.int64, device=p.device)
    step = min(CACHE, memory_budget()) // (uniform.itemsize * max(1, classes))
    for rows in slices(count, step):
        total = p[rows].cumsum(1, dtype=uniform.dtype)
        result[rows] = torch.searchsorted(total, uniform[rows] * total[:, -1:], right=True)
    return result.clamp_(max=classes - 1)
