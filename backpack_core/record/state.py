"""What a module is in a forward pass: its tensors and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import attrgetter, itemgetter
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


def tensors_of(module: Module, nested: tuple[str, ...] = ()) -> tuple[Owned, tuple[str, ...]]:
    """Parameters and buffers of a module, as this forward pass used them.

    Args:
        module: The module.
        nested: Parameters of modules inside that belong to it, as ``"out_proj.weight"``.

    Returns:
        The tensors, and which of them are parameters.
    """
    owned = _counted(module._parameters)
    if nested:
        owned.update(_counted({name: _nested(module, name) for name in nested}))
    parameters = tuple(owned)
    if module._buffers:
        owned.update(_counted(module._buffers))
    return owned, parameters


def _counted(tensors: Mapping[str, Tensor | None], prefix: str = "") -> Owned:
    try:
        return {prefix + n: (t, t._version) for n, t in tensors.items() if t is not None}
    except RuntimeError:  # of inference tensors, nobody counts
        return {prefix + n: (t, version_of(t)) for n, t in tensors.items() if t is not None}


def states_inside(module: Module, owned: Owned) -> tuple[State, ...]:
    """What the modules inside are; adds their parameters and buffers to the module's own."""
    states = []
    for path, part in module.named_modules(remove_duplicate=False):
        if part is module:
            continue
        states.append(State(part, part.training, *settings_of(part)))
        kept = {n: t for n, t in part._buffers.items() if t is not None and t.grad_fn is None}
        owned.update(_counted({**kept, **part._parameters}, f"{path}."))
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
_OURS = "_backpack_"
TRAITS_ATTRIBUTE = "_backpack_traits"


def settings_of(module: Module) -> Settings:
    """Names and values of a module's plain attributes."""
    attributes = module.__dict__
    own = [n for n in attributes if n not in _OF_ALL and not n.startswith(_OURS)]
    names = [n for n in own if isinstance(attributes[n], _PLAIN)]
    return tuple(names), tuple([attributes[name] for name in names])


class Traits:
    """What hangs on a module's class, and on which attributes it has: the same at every call.

    Attributes:
        resolved: The rule that speaks for it.
        generation: Of the registry that said so.
    """

    __slots__ = (
        "_attributes",
        "_count",
        "_is_plain",
        "_kind",
        "_names",
        "_types",
        "generation",
        "resolved",
    )

    def __init__(self, module: Module, resolved: Any, generation: int) -> None:
        attributes = module.__dict__
        own = [n for n in attributes if n not in _OF_ALL and not n.startswith(_OURS)]
        self.resolved, self.generation = resolved, generation
        self._kind, self._count = type(module), len(attributes)
        self._attributes = itemgetter("training", *own, "training")  # of one it is no tuple
        values = self._attributes(attributes)
        self._types = tuple(map(type, values))
        self._is_plain = (False, *(isinstance(v, _PLAIN) for v in values[1:-1]), False)
        self._names = tuple(compress(("", *own), self._is_plain))

    def settings(self, module: Module) -> Settings | None:
        """Names and values of its plain attributes; ``None`` if it is another module by now."""
        attributes = module.__dict__
        try:
            values = self._attributes(attributes)
        except KeyError:
            return None
        is_same = type(module) is self._kind and len(attributes) == self._count
        if not is_same or tuple(map(type, values)) != self._types:
            return None
        return self._names, tuple(compress(values, self._is_plain))

    def __deepcopy__(self, memo: Any) -> Traits:
        """Those of a copy."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In a file, nothing."""
        return type(None), ()


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
