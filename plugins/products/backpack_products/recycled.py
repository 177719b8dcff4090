"""Reuses the memory of old results for new results of the same size.

The first write to fresh memory causes a page fault for every four kilobytes. Per-sample gradients
are many times as large as the net, and a training loop drops them before the next pass. So the
memory of the last pass is written again, if reference counts prove that nobody else can see it. On
accelerators, torch's caching allocator does the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from backpack_core.engine.sink import replaced
from backpack_products._torch import holders_of, without_modes

# In bytes. Smaller results come from the heap, whose pages have been touched.
SMALLEST: Final = 2**19
_Key = tuple[torch.dtype, int]


class _Recycled(threading.local):
    """Tensors of this thread whose memory may be reused, by dtype and number of entries."""

    def __init__(self) -> None:
        self.memories: dict[_Key, list[Tensor]] = {}


_recycled = _Recycled()


def offer(owner: dict[str, Any], name: str, is_wanted: bool = True) -> None:
    """Take a result out of a dictionary, and offer its memory if nobody else holds it.

    Args:
        owner: The dictionary.
        name: The result's name there; it may be missing.
        is_wanted: Whether the memory may be reused.
    """
    value = owner.pop(name, None)
    if not is_wanted or type(value) is not Tensor or value.nbytes < SMALLEST or not value.is_cpu:
        return
    storage = value.untyped_storage()
    is_whole = value.nbytes == storage.nbytes()  # its axes may be in any order
    if value.requires_grad or not is_whole or storage.is_shared():
        return
    del storage
    held = [value]
    del value
    holders = holders_of(held)
    if holders is not None and holders == holders_of(_unheld(held[0]._base is not None)):
        memory = held[0].detach().as_strided((held[0].numel(),), (1,), 0)
        _recycled.memories.setdefault((memory.dtype, len(memory)), []).append(memory)


@cache
def _unheld(is_view: bool) -> list[Tensor]:
    """A list with a tensor, or a view, that nobody else holds, to compare reference counts with.

    The counts depend on the version, and on whether ``torch.compile`` runs frames.
    """
    # Modes may hold what is made, and views of inference tensors have no base.
    with without_modes(), torch.inference_mode(False):
        result = torch.zeros(1, 1, device="cpu")
        return [result[0] if is_view else result]


def take(like: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Memory to write a result into; ``None`` if there is none, or if autograd records.

    If only memory of other sizes was offered, it is freed, since new memory will be needed.

    Args:
        like: A tensor with the result's dtype and device.
        shape: The result's shape.
    """
    memories = _recycled.memories
    if not memories or like.device.type != "cpu" or torch.is_grad_enabled():
        return None
    size = torch.Size(shape)
    fitting = memories.get((like.dtype, size.numel()))
    if fitting:
        return fitting.pop().view(size)
    if size.numel() * like.element_size() >= SMALLEST:  # another batch size
        drop()
    return None


def drop() -> None:
    """Free the memory that was offered but not taken."""
    if _recycled.memories:
        _recycled.memories.clear()


replaced.offer, replaced.drop = offer, drop
