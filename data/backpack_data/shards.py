"""Models that are split over processes (``fully_shard``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_core import Extension
from backpack_core.errors import UnsupportedError, UsageError
from backpack_interplay.shards import shards_in
from backpack_products.merging import declaration


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds a part of a tensor: a ``DTensor``."""
    return hasattr(tensor, "placements")


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; a sharded one is gathered, which all processes must do together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def has_shards(model: Module, group: distributed.ProcessGroup | None) -> bool:
    """Whether parameters are sharded, among the processes of a group if there is one.

    Raises:
        UnsupportedError: Parameters are sharded by something other than ``fully_shard`` (a
            tensor-parallel plan, for example).
        UsageError: The processes that share the parameters are not those of the group.
    """
    of_modules = [m for m in model.modules() if _shards(m)]
    wholes = shards_in(model)
    known = {id(wholes.get(p, p)) for module in of_modules for p in module.parameters()}
    for path, (parameter, *_) in carriers(model).items():
        if not is_sharded(parameter):
            continue
        if id(parameter) not in known:
            raise UnsupportedError(
                f"The parameter {path!r} is a DTensor that layers compute with directly (tensor "
                "parallelism), and quantities of these layers are not known: shard the model with "
                "torch.distributed.fsdp.fully_shard, or use DistributedDataParallel."
            )
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        ranks = sorted(mesh.mesh.flatten().tolist())
        if group is not None and ranks != sorted(distributed.get_process_group_ranks(group)):
            raise UsageError(
                f"The parameter {path!r} is sharded among the ranks {ranks}, and process_group "
                f"has {sorted(distributed.get_process_group_ranks(group))}: results on shards "
                "need the same ranks."
            )
    return bool(known)


def carriers(model: Module) -> dict[str, list[Tensor]]:
    """The tensors that may hold values, by path: the shard, and the gathered parameter if any."""
    shards = shards_in(model)
    return {path: [shards[p], p] if p in shards else [p] for path, p in model.named_parameters()}


def wholes_by_shard(model: Module) -> dict[Tensor, Tensor]:
    """The gathered parameters that a model's forward pass uses, by the sharded ones."""
    if not shards_in(model):  # no forward pass yet
        for module in filter(_shards, model.modules()):
            module.unshard()  # type: ignore[operator]
            module.reshard()  # type: ignore[operator]
    return {held: used for used, held in shards_in(model).items()}


def placed(value: Any, extension: Extension, parameter: Tensor) -> Any:
    """A value that is the same on all processes, with the placement of a sharded parameter.

    Args:
        value: The value.
        extension: The extension.
        parameter: The parameter; a value of another shape, or per sample, does not change.
    """
    if not (is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape):
        return value
    if any(part.way == "concatenate" for part in declaration(extension).parts.values()):
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import

    like: Any = parameter
    # Every process has the value, so each takes its part and none sends anything.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def in_dtype_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Cast a tensor to the dtype a shard is stored in, or single precision, to add it up there.

    The forward pass may use another one.
    """
    is_float = tensor.is_floating_point() and is_sharded(parameter)
    return tensor.to(torch.promote_types(parameter.dtype, torch.float32)) if is_float else tensor


def _shards(module: Module) -> bool:
    return hasattr(type(module), "unshard")
