"""The arguments of a call by name, for rules of modules with several arguments.

A rule of ``forward(self, query, mask=None, *, bias=None)`` asks for ``tensor(view, "query")`` and
``optional_tensor(view, "bias")``, however the caller passed them, and returns its products with
``by_slot(view, {"query": (product,)})``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backpack_core.record.nested import iter_tensors
from backpack_core.record.view import View
from backpack_core.remember import remembered


def arguments(view: View) -> dict[str, Any]:
    """The arguments of ``forward`` by name, with defaults filled in; not to be changed."""
    return view.once("arguments", lambda: _bound(view))


def _bound(view: View) -> dict[str, Any]:
    bound = _signature(type(view.module).forward).bind(view.module, *view.args, **view.kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])  # without self


@remembered
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def slots(view: View) -> dict[str, range]:
    """For each argument that was given, which of ``view.inputs`` it holds; not to be changed."""
    return view.once("slots", lambda: _found(view))


def _found(view: View) -> dict[str, range]:
    parameters = list(_signature(type(view.module).forward).parameters)[1:]  # without self
    given = [*zip(parameters, view.stored.args, strict=False), *view.stored.kwargs.items()]
    found: dict[str, range] = {}
    start = 0
    for name, value in given:
        stop = start + sum(1 for _ in iter_tensors(value))
        found[name] = range(start, stop)
        start = stop
    return found


def optional_tensor(view: View, name: str) -> Tensor | None:
    """A tensor argument by name, in the dtype of the gradient; ``None`` if it was not given."""
    slot = slots(view).get(name)
    return view.tensor_input(slot[0]) if slot else None


def tensor(view: View, name: str) -> Tensor:
    """A tensor argument by name, in the dtype of the gradient."""
    return view.tensor_input(slots(view)[name][0])


def by_slot(
    view: View, products: dict[str, tuple[Tensor | None, ...]]
) -> tuple[Tensor | None, ...]:
    """Products by argument name, in the order of ``view.inputs``; ``None`` for the other inputs."""
    result: list[Tensor | None] = [None] * len(view.stored.inputs)
    for name, places in slots(view).items():
        for slot, product in zip(places, products.get(name, ()), strict=False):
            result[slot] = product
    return tuple(result)


def whole_call(view: View) -> tuple[View, Tensor | None]:
    """The call with all samples, and which of them this view shows (``None`` for all).

    A view cuts every tensor that is as long as the batch on axis 0. So an argument with another
    meaning of axis 0 (a mask, an initial state) is intact only in the whole call.
    """
    whole = view.full
    if view.indices is None:
        return whole, None
    chosen = torch.as_tensor(view.indices, device=whole.stored.inputs[0].device)
    return whole, chosen % whole.batch_size
