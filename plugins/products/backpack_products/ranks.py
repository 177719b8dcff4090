"""What the processes of a group must have in common, compared before they exchange tensors.

Sums over processes with different models or settings would look like any others. With tensors of
different sizes, a process waits for the others, or is ended by the backend.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module

from backpack_core.errors import UsageError


def require_member(group: Any) -> None:
    """Check a process group that a user gave; ``None`` passes.

    Raises:
        UsageError: It is not a process group, or this process is not in it.
    """
    if group is None:
        return
    if distributed.is_available() and distributed.is_initialized():
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise UsageError(
                f"Rank {distributed.get_rank()} is not in process_group=, so it cannot take part: "
                "call this only on the ranks that torch.distributed.new_group(...) was given."
            )
        if isinstance(group, distributed.ProcessGroup):
            return
    raise UsageError(
        "process_group= takes a group of torch.distributed, after init_process_group(...): "
        "torch.distributed.group.WORLD, or the result of torch.distributed.new_group(...). "
        f"Got {group!r:.80}."
    )


def require_same(
    own: Mapping[str, object], group: distributed.ProcessGroup | None, advice: str
) -> None:
    """Check that all processes of a group say the same; all of them must call it.

    Args:
        own: What must agree, by its name in the message. Other values than words are compared by
            their ``repr``.
        group: The processes; default: all.
        advice: The end of the message: what to do.

    Raises:
        UsageError: Something differs. Every process raises this.
    """
    told = {name: v if isinstance(v, str) else repr(v) for name, v in own.items()}
    every: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(every, told, group=group)
    for rank, other in enumerate(every):
        require_equal(every[0], other, "rank 0", f"rank {rank}", advice)


def require_equal(
    own: Mapping[str, str], other: Mapping[str, str], mine: str, theirs: str, advice: str
) -> None:
    """Check that two processes say the same.

    Args:
        own: What one process says, by name.
        other: What the other one says.
        mine: What to call the one.
        theirs: What to call the other.
        advice: What to do.

    Raises:
        UsageError: They say different things.
    """
    for name in {**own, **other}:
        one, two = own.get(name, "nothing"), other.get(name, "nothing")
        if one != two:
            start = max(0, _same_start(one, two) - 20)
            raise UsageError(
                f"{name} differs between processes of the group: {one[start:]:.60} on {mine}, and "
                f"{two[start:]:.60} on {theirs}. {advice}"
            )


def _same_start(one: str, two: str) -> int:
    """How many characters two words begin with in common."""
    pairs = zip(one, two, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


@contextmanager
def failing_together(group: distributed.ProcessGroup | None) -> Iterator[None]:
    """A block before an exchange: if it raises on one process, the others raise, too.

    Otherwise they would wait for that process in the exchange.

    Args:
        group: The processes; ``None`` for only this one.

    Raises:
        UsageError: The block has raised an error on another process.
    """
    try:
        yield
    except Exception:
        if group is not None:
            with suppress(RuntimeError):
                largest_of([1], group)
        raise
    if group is not None and any(largest_of([0], group)):
        raise UsageError(
            "Another process of the group raised an error in this pass, so no process has a "
            "result. Remove the cause that it names itself, and start all processes again."
        )


def largest_of(numbers: Sequence[float], group: distributed.ProcessGroup) -> list[float]:
    """The largest of what the processes of a group give, for each of some numbers."""
    is_nccl = distributed.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else "cpu"
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group)
    return [float(number) for number in found.tolist()]


def about(model: Module) -> dict[str, str]:
    """What processes compare of a model: parameters by name, and modes.

    Values are compared, too, except for parameters of which each process has a part.
    """
    named = [*model.named_parameters()]
    return {
        "The model": str({name: [*p.shape] for name, p in named}),
        "The precision of the model": str({name: str(p.dtype) for name, p in named}),
        "The list of trained parameters": str([name for name, p in named if p.requires_grad]),
        "The list of modules in train mode": str(
            [n for n, m in model.named_modules() if m.training]
        ),
        "The checksum of the parameters": digest(
            p for _, p in named if not hasattr(p, "placements")
        ),
    }


def digest(tensors: Iterable[Tensor]) -> str:
    """The :func:`checksum` of several tensors, in words."""
    return f"{reduce(lambda before, tensor: checksum(tensor, before), tensors, 0):08x}"


def checksum(tensor: Tensor, before: int = 0) -> int:
    """A checksum of type, shape and bytes; of a sparse tensor, of its type and shape alone.

    Args:
        tensor: The tensor.
        before: The checksum that this one continues.
    """
    found = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), before)
    if tensor.layout is not torch.strided:
        return found
    flat = tensor.detach().cpu().reshape(-1)
    # A copy: one entry may have any stride otherwise.
    data = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return zlib.crc32(data.numpy().tobytes(), found)
