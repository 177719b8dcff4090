"""What a module was during a forward pass: its tensors, and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core._torch import version_of

Owned = dict[str, tuple[Tensor, int]]


def tensors_of(module: Module, more: tuple[str, ...]) -> tuple[Owned, tuple[str, ...]]:
    """Parameters and buffers of a module, each with how often it had been changed in place.

    Args:
        module: The module, right after its forward pass.
        more: Parameters of modules inside that count as its own, as ``"out_proj.weight"``.

    Returns:
        The tensors by name, and the names of the parameters among them.
    """
    owned = {n: (t, version_of(t)) for n, t in module._parameters.items() if t is not None}
    for name in more:
        tensor = _attribute(module, name)
        if tensor is not None:
            owned[name] = (tensor, version_of(tensor))
    parameters = tuple(owned)
    for name, tensor in module._buffers.items():
        if tensor is not None:
            owned[name] = (tensor, version_of(tensor))
    return owned, parameters


def computed_in_hooks(module: Module, names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Parameters that a forward pre-hook computed from others and left as plain attributes."""
    for name in names:
        value = module.__dict__.get(name)
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield name, value


def _attribute(module: Module, name: str) -> Tensor | None:
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


_PLAIN = (int, float, bool, str, type(None), tuple, torch.dtype)
_OF_ALL = frozenset(vars(Module()))
_setting_names: dict[type[Module], tuple[int, tuple[str, ...]]] = {}


def settings_of(module: Module) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and values of a module's plain attributes."""
    attributes = module.__dict__
    known = _setting_names.get(type(module))
    if known is None or known[0] != len(attributes):
        names = [n for n, v in attributes.items() if n not in _OF_ALL and isinstance(v, _PLAIN)]
        known = _setting_names[type(module)] = (len(attributes), tuple(names))
    names = known[1]
    try:
        return names, tuple([attributes[name] for name in names])
    except KeyError:  # another instance of the class has other attributes
        del _setting_names[type(module)]
        return settings_of(module)
