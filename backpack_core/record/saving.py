"""Stores the tensors of a call through the hooks that autograd's saved tensors go through.

So checkpoints and offloading save memory with extensions, too. Stand-ins without memory show
shapes, types and devices. The numbers are unpacked when a rule reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack_core._torch import version_of
from backpack_core.errors import OverwrittenInputError
from backpack_core.record.call import Stored
from backpack_core.record.structure import map_tensors
from backpack_interplay.checkpoints import SavedTensor, save, unpack

if TYPE_CHECKING:
    from backpack_core.record.view import View


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


def read(view: View, slot: int, what: str) -> Tensor:
    """An input or output of a call with its numbers; slots count inputs first.

    Raises:
        OverwrittenInputError: It was changed in place since the forward pass.
    """
    stored = view.stored
    tensor, version = (*stored.inputs, *stored.outputs)[slot], stored.versions[slot]
    is_changed = version_of(tensor) != version
    if view.taken is not None and stored.saved[slot] is not None:
        tensor = view.taken.tensor(slot)
        # The version of a copy counts from zero; that of a recomputed tensor, as at first.
        is_changed = version_of(tensor) > version
    if is_changed:
        raise OverwrittenInputError(
            f"{view.path}: its {what} was changed in place after it was stored, so derivatives "
            "would be computed from overwritten memory. Use an out-of-place operation, or "
            "clone the tensor before changing it."
        )
    return tensor


class Taken:
    """The tensors of a call that were unpacked during a visit.

    Attributes:
        found: The tensors, by slot.
    """

    __slots__ = ("_stored", "found")

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.found: dict[int, Tensor] = {}

    def tensor(self, slot: int) -> Tensor:
        """Unpack one, once; slots count inputs first."""
        if slot not in self.found:
            stored, saved = self._stored, self._stored.saved[slot]
            kept = (*stored.inputs, *stored.outputs)[slot]
            self.found[slot] = kept if saved is None else unpack(saved)
        return self.found[slot]

    def values(self) -> Stored:
        """The call's tensors, all with their numbers."""
        stored = self._stored
        tensors = (*stored.inputs, *stored.outputs)
        found = {id(tensor): self.tensor(slot) for slot, tensor in enumerate(tensors)}
        return _replaced(stored, found)


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
