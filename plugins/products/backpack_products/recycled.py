"""Reuses the memory of old results for new results of the same size.

The first write to fresh memory causes a page fault for every four kilobytes. Per-sample gradients
are many times as large as the net, and a training loop drops them before the next pass. So the
memory of the last pass is written again, if reference counts prove that nobody else can see it. On
accelerators, torch's caching allocator does the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from backpack_products._torch import holders_of, without_modes

# In bytes. Smaller results come from the heap, whose pages have been touched.
SMALLEST: Final = 2**19
_Key = tuple[torch.dtype, int]


class _Recycled(threading.local):
    """Tensors of this thread whose memory may be reused, by dtype and number of entries."""

    def __init__(self) -> None:
        self.memories: dict[_Key, list[Tensor]] = {}


_recycled = _Recycled()


def offer(owners: Iterable[dict[str, Any]], names: Sequence[str], is_wanted: bool = True) -> None:
    """Take results out of dictionaries, and offer their memory if nobody else holds them.

    Args:
        owners: The dictionaries.
        names: The names of results there; some may be missing.
        is_wanted: Whether the memory may be reused.
    """
    unheld: dict[bool, Any] = {}  # the reference counts of tensors and of views, as they are now
    for owner in owners:
        for name in names:
            value = owner.pop(name, None)
            if is_wanted and type(value) is Tensor and value.nbytes >= SMALLEST and value.is_cpu:
                held = [value]
                del value
                _offer(held, unheld)


def _offer(held: list[Tensor], unheld: dict[bool, Any]) -> None:
    """Offer the memory of a tensor.

    Args:
        held: A list with the tensor, which nobody else here holds.
        unheld: The reference counts of a tensor that nobody holds, and of a view; filled in.
    """
    (value,) = held
    storage = value.untyped_storage()
    is_whole = value.nbytes == storage.nbytes()  # its axes may be in any order
    if value.requires_grad or not is_whole or storage.is_shared():
        return
    is_view = value._base is not None
    del storage, value
    if is_view not in unheld:
        unheld[is_view] = holders_of(_unheld(is_view))
    holders = holders_of(held)
    if holders is not None and holders == unheld[is_view]:
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


def taken_zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros to add to, in memory that was offered if there is some; see :func:`take`."""
    memory = take(like, shape)
    return like.new_zeros(shape) if memory is None else memory.zero_()


def drop() -> None:
    """Free the memory that was offered but not taken."""
    if _recycled.memories:
        _recycled.memories.clear()


# By model, the names of the results that were last stored on its parameters.
_fields: Final[WeakKeyDictionary[Module, list[str]]] = WeakKeyDictionary()
# The models of the last pass of all, the names of its results, and the parameters that may have got
# them, objects by ``id``; ``None`` if these parameters are not known.
_latest: tuple[list[int], list[str], list[int]] | None = None


def will_store(
    models: Sequence[Module], fields: list[str], used: Iterable[Tensor] | None = None
) -> tuple[bool, bool]:
    """Note that results are about to be stored.

    Models may share parameters, and functions may use those of any model. So which parameters have
    results is known if the last pass of all was like this one; the last one over each model does
    not tell.

    Args:
        models: The models.
        fields: The names of the results.
        used: The parameters that may get results; ``None`` if that is not known.

    Returns:
        Whether the last results of each model had the same names, so that their memory may be
        written again; and whether only ``used`` have such results.
    """
    global _latest
    are_same, before = all(_fields.get(model) == fields for model in models), _latest
    _fields.update(dict.fromkeys(models, fields))
    _latest = None if used is None else ([*map(id, models)], fields, [*map(id, used)])
    return are_same, _latest is not None and _latest == before
