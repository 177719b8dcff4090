"""What a call was given, by argument name, and what is computed once for it. Imports core only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from backpack_core.calls import ModuleCall, iter_tensors

T = TypeVar("T")


def arguments(call: ModuleCall) -> dict[str, Any]:
    """The arguments of the module's ``forward`` by name, defaults filled in."""
    bound = _signature(type(call.module).forward).bind(call.module, *call.args, **call.kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])  # without self


@cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def slots(call: ModuleCall) -> dict[str, range]:
    """Which of ``call.inputs`` each argument that was given holds, by argument name."""
    parameters = list(_signature(type(call.module).forward).parameters)[1:]  # without self
    given = [*zip(parameters, call.args, strict=False), *call.kwargs.items()]
    found: dict[str, range] = {}
    start = 0
    for name, value in given:
        stop = start + sum(1 for _ in iter_tensors(value))
        found[name] = range(start, stop)
        start = stop
    return found


def optional_tensor(call: ModuleCall, name: str) -> Tensor | None:
    """A tensor argument by name, in the dtype of the gradient; ``None`` if none was given."""
    found = slots(call).get(name)
    return call.tensor_input(found[0]) if found else None


def tensor(call: ModuleCall, name: str) -> Tensor:
    """A tensor argument by name, in the dtype of the gradient."""
    return call.tensor_input(slots(call)[name][0])


def by_slot(
    call: ModuleCall, products: dict[str, tuple[Tensor | None, ...]]
) -> tuple[Tensor | None, ...]:
    """Products by argument name, in the order of ``call.inputs``; ``None`` for the others."""
    result: list[Tensor | None] = [None] * len(call.inputs)
    for name, places in slots(call).items():
        for slot, product in zip(places, products.get(name, ()), strict=False):
            result[slot] = product
    return tuple(result)


def root(call: ModuleCall) -> tuple[ModuleCall, Tensor | None]:
    """The call with all samples, and which of them this view shows (``None`` for all).

    A view cuts every tensor whose axis 0 is as long as the batch. A mask or an initial state, whose
    axis 0 is another one, is what it was only in the call with all samples.
    """
    whole = call.full
    if call.indices is None:
        return whole, None
    chosen = torch.as_tensor(call.indices, device=whole.inputs[0].device)
    return whole, chosen % whole.batch_size


def once(call: ModuleCall, key: str, compute: Callable[[], T]) -> T:
    """A value that depends on the call alone, computed once.

    A value from a pass without gradients is not handed to a pass that differentiates through it.
    """
    slot = (key, torch.is_grad_enabled(), call.dtype)
    if slot not in call.constants:
        call.constants[slot] = compute()
    value: T = call.constants[slot]
    return value


def once_per_columns(
    call: ModuleCall, key: str, mat: Tensor, compute: Callable[[], T], keep: int = 4
) -> T:
    """A value that depends on the call and on the columns, shared by all that are given ``mat``.

    Columns that carry a graph are not kept: their graph may lead to the node that owns the call,
    which would then never die. The memo holds ``mat`` itself, so that its identity stays taken.
    """
    if mat.requires_grad:
        return compute()
    entries: list[tuple[Tensor, T]] = call.memo.setdefault((key, call.output_nr), [])
    for stored, value in entries:
        if stored is mat:
            return value
    value = compute()
    entries.append((mat, value))
    del entries[:-keep]
    return value
