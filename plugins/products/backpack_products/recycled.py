"""Memory of results that nobody holds any more, for results of the same size.

The first write to fresh memory takes a page fault for every four kilobytes. Individual gradients
are many times as large as the net, and a training loop drops them before the next pass. So memory
that the last pass stored into is written again, where counts of references prove that nobody else
can see it. On an accelerator torch's allocator does that by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from backpack_core.replaced import replaced
from backpack_products._torch import holders_of

# Smaller ones come from the heap, whose pages are there.
SMALLEST: Final = 2**19
_Key = tuple[torch.dtype, int]


class _Recycled(threading.local):
    """Tensors of this thread whose memory may be written, by type and number of entries."""

    def __init__(self) -> None:
        self.there: dict[_Key, list[Tensor]] = {}


_recycled = _Recycled()


def offer(owner: dict[str, Any], name: str, is_wanted: bool = True) -> None:
    """Take a result out of a dictionary, and offer its memory if nobody else holds it.

    Args:
        owner: The dictionary.
        name: The result's name there; it may be missing.
        is_wanted: Whether somebody may take it.
    """
    value = owner.pop(name, None)
    if not is_wanted or type(value) is not Tensor or value.nbytes < SMALLEST or not value.is_cpu:
        return
    is_whole = value.is_contiguous() and value.nbytes == value.untyped_storage().nbytes()
    if value.requires_grad or not is_whole or value.untyped_storage().is_shared():
        return
    holders = holders_of(value)
    if holders is not None and holders == _nobody(value._base is not None):
        memory = value.detach().view(-1)
        _recycled.there.setdefault((memory.dtype, len(memory)), []).append(memory)


@cache
def _nobody(is_view: bool) -> tuple[int, ...] | None:
    """The counts of a result that nobody else holds; they differ between versions."""
    made = torch.zeros(1, 1, device="cpu")
    owner = {"result": made[0] if is_view else made}
    del made
    value = owner.pop("result", None)
    assert value is not None
    return holders_of(value)


def take(like: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Memory to write a result into; ``None`` if there is none, or autograd records.

    What was offered is let go of where it does not fit, so that it takes no space beside what does.

    Args:
        like: A tensor of the result's type, and on its device.
        shape: The result's shape.
    """
    there = _recycled.there
    if not there or like.device.type != "cpu" or torch.is_grad_enabled():
        return None
    size = torch.Size(shape)
    found = there.get((like.dtype, size.numel()))
    if found:
        return found.pop().view(size)
    if size.numel() * like.element_size() >= SMALLEST:  # another batch: let go before it grows
        drop()
    return None


def drop() -> None:
    """Let go of what was offered and not taken."""
    if _recycled.there:
        _recycled.there.clear()


replaced.offer, replaced.drop = offer, drop
