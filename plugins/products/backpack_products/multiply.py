"""Products of large matrices on a CPU, by the faster of two libraries: MKL and oneDNN.

``torch.mm`` uses MKL, which does not use AVX-512 fully on processors that are not made by Intel.
Torch also contains oneDNN, for convolutions, which is twice as fast there. The faster library is
measured once in a process. ``torch.backends.mkldnn.flags(enabled=False)`` and
``torch.use_deterministic_algorithms(True)`` leave all products to ``torch.mm``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack_products._torch import is_on_host, is_onednn_on, onednn_linear, without_modes
from backpack_products.tuning import EACH, LARGER, WHOLE, is_unsplit

_PLAIN = (Tensor, Parameter)  # other classes have products of their own
_SIZE, _RUNS = 256, 5  # of the matrices that are multiplied to compare, and how often


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, of matrices ``[M, K]`` and ``[K, N]``."""
    if left.shape[0] * right.numel() < WHOLE or not _is_for_onednn(left, right):
        return left @ right
    return _by_onednn(left, right).contiguous()


def add_product(total: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """``total.addmm_(left, right, beta=beta, alpha=alpha)``; with ``beta=0`` it is not read."""
    if left.shape[0] * right.numel() < WHOLE or not _is_for_onednn(left, right):
        total.addmm_(left, right, beta=beta, alpha=alpha)
    elif beta:
        total.mul_(beta).add_(_by_onednn(left, right), alpha=alpha)
    else:
        torch.mul(_by_onednn(left, right), alpha, out=total)


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, by rows or by columns.

    OneDNN copies its first matrix unless that lies by rows. A large one may rather be the second:
    then the other is copied, and the result lies by columns.
    """
    (rows, size), columns = left.shape, right.shape[1]
    if left.is_contiguous() or rows * size <= columns * (size + rows):
        return onednn_linear(left, right.T)
    return onednn_linear(right.T, left).T


def multiply_each(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.bmm(left, right)``, of matrices ``[B, M, K]`` and ``[B, K, N]``.

    Args:
        left: The left matrices.
        right: The right matrices.
        out: Where to write the products; default: a new tensor.
    """
    single = left.shape[1] * left.shape[2] * right.shape[2]
    if not are_one_by_one(single, left, right):
        return torch.bmm(left, right, out=out)
    found = left.new_empty(len(left), left.shape[1], right.shape[2]) if out is None else out
    for target, one, other in zip(found, left, right, strict=True):
        target.copy_(_by_onednn(one, other))
    return found


def are_one_by_one(single: int, *factors: Tensor) -> bool:
    """Whether products of a batch, of ``single`` multiply-adds each, are computed one by one."""
    return single >= EACH and _is_for_onednn(*factors)


def _is_for_onednn(*factors: Tensor) -> bool:
    are_plain = all(type(f) in _PLAIN and f.dtype is torch.float32 for f in factors)
    return are_plain and is_on_host(*factors) and not is_unsplit() and _is_wanted()


def _is_wanted() -> bool:
    return is_onednn_on() and not torch.are_deterministic_algorithms_enabled() and _is_faster()


@cache
def _is_faster() -> bool:
    """Whether oneDNN takes clearly less time, so that it does not win by chance."""
    with without_modes():
        some = torch.ones(_SIZE, _SIZE, dtype=torch.float32, device="cpu")
        try:
            theirs = _seconds(lambda: onednn_linear(some, some))
        except (AttributeError, RuntimeError):  # this build of torch lacks it
            return False
        return _seconds(lambda: some @ some) > LARGER * theirs


def _seconds(product: Callable[[], Tensor]) -> float:
    found = []
    for _ in range(_RUNS):
        begun = time.perf_counter()
        product()
        found.append(time.perf_counter() - begun)
    return min(found)
