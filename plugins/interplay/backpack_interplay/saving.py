"""Stores the tensors of a call through the hooks that autograd's saved tensors go through.

So checkpoints and offloading save memory with extensions, too. Stand-ins without memory show
shapes, types and devices. The numbers are unpacked when a rule reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack_core._torch import has_memory, memory_of, version_of
from backpack_core.record.call import Stored
from backpack_core.record.nested import map_tensors
from backpack_core.record.run import Run, layout_of
from backpack_core.record.storage import UnpackedTensors
from backpack_interplay.checkpoints import SavedTensor, save, unpack


def through_hooks(stored: Stored) -> Stored:
    """A call's tensors as stand-ins, with what the hooks took of them in ``saved``."""
    taken: dict[int, SavedTensor] = {}
    stands: dict[int, Tensor] = {}
    for tensor in (*stored.inputs, *stored.outputs):
        if id(tensor) in taken or isinstance(tensor, Parameter) or _is_unusual(tensor):
            continue
        found = save(tensor)
        if found is not None:
            taken[id(tensor)], stands[id(tensor)] = found, _stand_in(tensor)
    if not taken:
        return stored

    saved = tuple([taken.get(id(tensor)) for tensor in (*stored.inputs, *stored.outputs)])
    return _replaced(stored, stands)._replace(saved=saved)


def shown_by(run: Run, tensors: Sequence[Tensor], stands: Iterable[Tensor]) -> Run:
    """The run of a model for a call whose tensors are replaced by stand-ins with other memory."""
    found = run.receives(tensors)
    given = [t for t in stands if t.dim() and has_memory(t)] if found else ()
    axis = 0 if found > 1 else -1
    return run._replace(memories={memory_of(t): layout_of(t, axis) for t in given})


class Unpacked(UnpackedTensors):
    """The tensors of a call that were unpacked during a visit."""

    __slots__ = ("_stored", "tensors")

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.tensors: dict[int, Tensor] = {}

    def tensor(self, slot: int) -> tuple[Tensor, bool]:
        """Unpack one, once, and compare its version."""
        tensor, stored = self._unpacked(slot), self._stored
        version, known = version_of(tensor), stored.versions[slot]
        # The version of a copy counts from zero; that of a recomputed tensor, as at first.
        return tensor, version != known if stored.saved[slot] is None else version > known

    def values(self) -> Stored:
        """Unpack all that are left."""
        stored = self._stored
        tensors = (*stored.inputs, *stored.outputs)
        found = {id(tensor): self._unpacked(slot) for slot, tensor in enumerate(tensors)}
        return _replaced(stored, found)

    def _unpacked(self, slot: int) -> Tensor:
        if slot not in self.tensors:
            stored, saved = self._stored, self._stored.saved[slot]
            kept = (*stored.inputs, *stored.outputs)[slot]
            self.tensors[slot] = kept if saved is None else unpack(saved)
        return self.tensors[slot]


def _replaced(stored: Stored, by: dict[int, Tensor]) -> Stored:
    """A call's tensors with some replaced, by ``id``."""

    def other(tensor: Tensor) -> Tensor:
        return by.get(id(tensor), tensor)

    return stored._replace(
        args=map_tensors(stored.args, other),
        kwargs=map_tensors(stored.kwargs, other),
        inputs=tuple(map(other, stored.inputs)),
        outputs=tuple(map(other, stored.outputs)),
    )


def _is_unusual(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or type(tensor) is not Tensor


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
