"""Stores the tensors of a call through the current saved-tensor hooks.

This way, checkpoints and offloading save memory with extensions, too. Stand-ins without memory have
the shapes, dtypes and devices. The values are unpacked when a rule reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack_core._torch import has_memory, memory_of, version_of
from backpack_core.record.call import Stored
from backpack_core.record.models import Run
from backpack_core.record.storage import UnpackedTensors
from backpack_interplay.checkpoints import SavedTensor, save, unpack
from backpack_operations.received import ModelRun, layout_of
from backpack_products.nested import map_tensors


def through_hooks(stored: Stored) -> Stored:
    """A call's tensors with stand-ins for those that hooks packed, which are in ``saved``."""
    packed: dict[int, SavedTensor] = {}
    stand_ins: dict[int, Tensor] = {}
    for tensor in (*stored.inputs, *stored.outputs):
        if id(tensor) in packed or isinstance(tensor, Parameter) or _is_unusual(tensor):
            continue
        saved_tensor = save(tensor)
        if saved_tensor is not None:
            packed[id(tensor)], stand_ins[id(tensor)] = saved_tensor, _stand_in(tensor)
    if not packed:
        return stored
    saved = tuple([packed.get(id(tensor)) for tensor in (*stored.inputs, *stored.outputs)])
    return replace(_replaced(stored, stand_ins), saved=saved)


def shown_by(run: Run, tensors: Sequence[Tensor], stand_ins: Iterable[Tensor]) -> Run:
    """The run of a model, with the memories of stand-ins instead of those of a call's tensors."""
    if not isinstance(run, ModelRun):
        return run
    received = run.receives(tensors)
    given = [t for t in stand_ins if t.dim() and has_memory(t)] if received else ()
    axis = 0 if received > 1 else -1
    return run.seen_as({memory_of(t): layout_of(t, axis) for t in given})


class Unpacked(UnpackedTensors):
    """The tensors of a call, unpacked during a visit."""

    __slots__ = ("_stored", "tensors")

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.tensors: dict[int, Tensor] = {}

    def tensor(self, slot: int) -> tuple[Tensor, bool]:
        """A tensor, unpacked once, and whether it was changed in place since the forward pass."""
        tensor, stored = self._unpacked(slot), self._stored
        now, before = version_of(tensor), stored.versions[slot]
        # An offloaded copy counts versions from zero; a recomputed tensor counts as at first.
        return tensor, now != before if stored.saved[slot] is None else now > before

    def values(self) -> Stored:
        """The call's tensors, all unpacked."""
        stored = self._stored
        tensors = (*stored.inputs, *stored.outputs)
        unpacked = {id(tensor): self._unpacked(slot) for slot, tensor in enumerate(tensors)}
        return _replaced(stored, unpacked)

    def _unpacked(self, slot: int) -> Tensor:
        if slot not in self.tensors:
            stored, saved = self._stored, self._stored.saved[slot]
            tensor = (*stored.inputs, *stored.outputs)[slot]
            self.tensors[slot] = tensor if saved is None else unpack(saved)
        return self.tensors[slot]


def _replaced(stored: Stored, by: dict[int, Tensor]) -> Stored:
    """A call's tensors with some replaced, by ``id``."""

    def other(tensor: Tensor) -> Tensor:
        return by.get(id(tensor), tensor)

    return replace(
        stored,
        args=map_tensors(stored.args, other),
        kwargs=map_tensors(stored.kwargs, other),
        inputs=tuple(map(other, stored.inputs)),
        outputs=tuple(map(other, stored.outputs)),
    )


def _is_unusual(tensor: Tensor) -> bool:
    """Whether a tensor is sparse, or of a subclass, so that it stays in memory."""
    return tensor.layout is not torch.strided or type(tensor) is not Tensor


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device, with a single number in memory."""
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
