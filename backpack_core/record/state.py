"""What a module is in a forward pass: its tensors and its settings."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core._torch import version_of

Owned = dict[str, tuple[Tensor, int]]  # tensors, and how often each was changed in place, by name
Settings = tuple[tuple[str, ...], tuple[Any, ...]]  # names, values


class State(NamedTuple):
    """What a module was in a forward pass, besides its tensors.

    Attributes:
        module: The module.
        training: Whether it was in train mode.
        names: Names of its plain attributes (``eps``, ``p``, ``stride``).
        values: Their values.
    """

    module: Module
    training: bool
    names: tuple[str, ...]
    values: tuple[Any, ...]


def tensors_of(module: Module, nested: tuple[str, ...]) -> tuple[Owned, tuple[str, ...]]:
    """Parameters and buffers of a module, as this forward pass used them.

    Args:
        module: The module.
        nested: Parameters of modules inside that belong to it, as ``"out_proj.weight"``.

    Returns:
        The tensors, and which of them are parameters.
    """
    owned: Owned = {n: (t, version_of(t)) for n, t in module._parameters.items() if t is not None}
    for name in nested:
        tensor = _nested(module, name)
        if tensor is not None:
            owned[name] = (tensor, version_of(tensor))
    parameters = tuple(owned)
    for name, tensor in module._buffers.items():
        if tensor is not None:
            owned[name] = (tensor, version_of(tensor))
    return owned, parameters


def states_inside(module: Module, owned: Owned) -> tuple[State, ...]:
    """What the modules inside are; adds their parameters and buffers to the module's own."""
    states = []
    for path, part in module.named_modules(remove_duplicate=False):
        if part is module:
            continue
        states.append(State(part, part.training, *settings_of(part)))
        kept = {n: t for n, t in part._buffers.items() if t is not None and t.grad_fn is None}
        kept.update({n: t for n, t in part._parameters.items() if t is not None})
        owned.update({f"{path}.{n}": (t, version_of(t)) for n, t in kept.items()})
    return tuple(states)


def computed_in_hooks(module: Module, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Parameters that a forward pre-hook computed from others and left as plain attributes."""
    attributes = module.__dict__
    if attributes.keys().isdisjoint(names):
        return {}
    found = {name: attributes[name] for name in names if name in attributes}
    return {n: t for n, t in found.items() if isinstance(t, Tensor) and t.grad_fn is not None}


def _nested(module: Module, name: str) -> Tensor | None:
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


_PLAIN = (int, float, bool, str, type(None), tuple, torch.dtype)
_OF_ALL = frozenset(vars(Module()))


def settings_of(module: Module) -> Settings:
    """Names and values of a module's plain attributes."""
    attributes = module.__dict__
    names = [n for n in attributes if n not in _OF_ALL and isinstance(attributes[n], _PLAIN)]
    return tuple(names), tuple([attributes[name] for name in names])


def as_it_was(module: Module, settings: Settings, owned: Owned) -> Module:
    """A module, or a stand-in of the same class with the values of a forward pass.

    Args:
        module: The module.
        settings: What :func:`settings_of` gave then.
        owned: What :func:`tensors_of` gave.
    """
    names, values = settings
    attributes = module.__dict__
    if "_parameters" not in attributes:  # compiled, with a storage of its own
        return module
    missing = (None, 0)
    tables = [attributes[table] for table in ("_parameters", "_buffers")]
    if (
        all(name in attributes for name in names)
        and tuple([attributes[name] for name in names]) == values
        and all(t is owned.get(n, missing)[0] for table in tables for n, t in table.items())
    ):
        return module
    then = object.__new__(type(module))
    then.__dict__.update(attributes)
    then.__dict__.update(zip(names, values, strict=True))
    for name, table in zip(("_parameters", "_buffers"), tables, strict=True):
        then.__dict__[name] = {n: owned.get(n, missing)[0] for n in table}
    return then
