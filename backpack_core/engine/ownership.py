"""Results are their users' own: no two share memory, nor one with what the pass was shown."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backpack_core._torch import memories_of, memory_of
from backpack_core.record.view import View

_TAKEN = "memory of results"


def owned(value: Any, view: View) -> Any:
    """A value in memory of its own.

    Args:
        value: What an extension returned: a tensor, a list of tensors, or something that sees to it
            itself.
        view: The visit; it knows what rules were shown, and what earlier extensions got.
    """
    if isinstance(value, Tensor):
        return _owned(value, view)
    if isinstance(value, list):
        for position, item in enumerate(value):
            if isinstance(item, Tensor):
                value[position] = _owned(item, view)
    return value


def _owned(tensor: Tensor, view: View) -> Tensor:
    taken: set[int] | None = view.kept.get(_TAKEN)
    if taken is None:
        taken = view.kept[_TAKEN] = memories_of(_shown(view.full))
    gradient = view.full.grad_output
    if gradient is not None:  # earlier columns of the same call came without it
        taken.add(memory_of(gradient))
    memory = memory_of(tensor)
    if memory in taken:
        tensor = tensor.clone()
        memory = memory_of(tensor)
    taken.add(memory)
    return tensor


def _shown(view: View) -> list[Tensor]:
    stored = view.stored
    return [*stored.inputs, *stored.outputs, *[tensor for tensor, _ in stored.owned.values()]]
