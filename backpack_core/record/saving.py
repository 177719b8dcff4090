"""Tensors of a call where autograd saves through hooks (checkpoints, offloading): through the same.

Their memory is then what the hooks leave of it. Shapes, types and devices are shown by stand-ins
without memory; numbers are asked for when a rule reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from backpack_core._checkpoints import SavedTensor, save
from backpack_core.record.call import Stored
from backpack_core.record.structure import map_tensors


def through_hooks(stored: Stored) -> Stored:
    """The same call, with what the hooks took in ``saved`` and stand-ins in its place."""
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

    def stand(tensor: Tensor) -> Tensor:
        return stands.get(id(tensor), tensor)

    tensors = (*stored.inputs, *stored.outputs)
    return stored._replace(
        args=map_tensors(stored.args, stand),
        kwargs=map_tensors(stored.kwargs, stand),
        inputs=tuple(map(stand, stored.inputs)),
        outputs=tuple(map(stand, stored.outputs)),
        saved=tuple(taken.get(id(tensor)) for tensor in tensors),
    )


def _is_unusual(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or type(tensor) is not Tensor


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
