"""Models that are split over processes: ``fully_shard`` (FSDP2)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import Module

from backpack_core.errors import UsageError


def is_shard(parameter: Tensor) -> bool:
    """Whether this process holds a part of a parameter."""
    return hasattr(parameter, "placements")


def check_shards(
    model: Module, named: Mapping[str, Tensor], world: int, max_rows: int | None
) -> bool:
    """Whether parameters are sharded; refuse shards that cannot be added up.

    Args:
        model: The model.
        named: Its trained parameters.
        world: How many processes train together.
        max_rows: How many rows are shown at once.

    Raises:
        UsageError: Parameters are not split over all processes, or not by ``fully_shard``, or
            batches come in parts.
    """
    shards = {name: p for name, p in named.items() if is_shard(p)}
    for name, parameter in shards.items():
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        if mesh.ndim != 1 or mesh.size() != world or not _is_fully_sharded(model):
            raise UsageError(
                f"The parameter {name} is split over a mesh of shape {[*mesh.shape]}, but {world} "
                "processes train together, each with its own samples. Use fully_shard with a mesh "
                "of one axis over all of them, without tensor parallelism."
            )
    if shards and max_rows is not None:
        raise UsageError(
            "max_rows= shows batches in parts, as many as each process needs, but a sharded model "
            "runs in all processes at once. Leave out max_rows, and make batch_size smaller."
        )
    return bool(shards)


def _is_fully_sharded(model: Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, without a graph."""
    found: Tensor = tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found.detach()


def placed_as(whole: Tensor, parameter: Tensor) -> Tensor:
    """A gradient, split like its parameter, and in its precision.

    Args:
        whole: The gradient, the same in all processes.
        parameter: Its parameter.
    """
    whole = whole.to(parameter.dtype)
    if not is_shard(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)
