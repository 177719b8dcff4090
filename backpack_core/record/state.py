"""The state of a module in a forward pass: its tensors, and its plain attributes (settings).

Both may change before the backward pass, and rules must compute with the values of the forward
pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core._torch import versions_of
from backpack_core.record.models import OWNER_ATTRIBUTE, PATH_ATTRIBUTE

Owned = dict[str, tuple[Tensor, int]]  # tensors by name, each with its version counter


class Settings:
    """Names and values of a module's plain attributes.

    Attributes:
        names: The names.
        values: The values.
    """

    __slots__ = ("__weakref__", "names", "values")

    def __init__(self, names: tuple[str, ...] = (), values: tuple[Any, ...] = ()) -> None:
        self.names, self.values = names, values

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Names and values."""
        return iter((self.names, self.values))


NO_SETTINGS: Final = Settings()


def tensors_of(
    module: Module, nested: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor | None], int]:
    """Parameters and buffers of a module, as this forward pass uses them.

    Args:
        module: The module.
        nested: Parameters of submodules that the rule covers, as ``"out_proj.weight"``.

    Returns:
        The tensors by name, parameters first, and the number of parameters.
    """
    owned: dict[str, Tensor | None] = {**module._parameters}
    if nested:
        owned.update({name: _nested(module, name) for name in nested})
    count = len(owned)
    if module._buffers:
        owned.update(module._buffers)
    return owned, count


@cache
def nested(names: tuple[str, ...]) -> tuple[str, ...]:
    """The parameters that belong to submodules."""
    return tuple(name for name in names if "." in name)


def versions_and_frozen(
    received: Sequence[int], outputs: tuple[Tensor, ...], owned: dict[str, Tensor | None]
) -> tuple[Sequence[int], Sequence[str]]:
    """Version counters of a call's tensors, and the names of those of its module that are frozen.

    Args:
        received: The version counters of the inputs, before the module ran.
        outputs: What it returned.
        owned: Its own tensors.
    """
    frozen: list[str] = []
    try:
        versions = [*received, *[output._version for output in outputs]]
        for name, tensor in owned.items():
            if tensor is not None:
                versions.append(tensor._version)
                if not tensor.requires_grad:
                    frozen.append(name)
    except RuntimeError:  # of an inference tensor
        frozen = [n for n, t in owned.items() if t is not None and not t.requires_grad]
        versions = [*received, *versions_of((*outputs, *owned.values()))]
    return versions, frozen or ()  # the garbage collector does not track an empty tuple


def _nested(module: Module, name: str) -> Tensor | None:
    try:
        value = attrgetter(name)(module)
    except AttributeError:
        return None
    return value if isinstance(value, Tensor) else None


_PLAIN = (int, float, bool, str, type(None), type(...), torch.dtype)
_ENDS = attrgetter("start", "stop", "step")
# The attributes that every module has: tables of parameters, buffers, submodules and hooks.
MODULE_ATTRIBUTES = frozenset(vars(Module())) - {"training"}
TRAITS_ATTRIBUTE = "_backpack_traits"
# Names of attributes that somebody keeps tensors of a call in until its visit. Nothing is computed
# from them.
SHOWN_ATTRIBUTE = "_backpack_shown"
OUR_ATTRIBUTES = (TRAITS_ATTRIBUTE, OWNER_ATTRIBUTE, PATH_ATTRIBUTE, SHOWN_ATTRIBUTE)


def _is_plain(value: Any) -> bool:
    """Whether a value holds no tensor, whose graph could lead back to the call."""
    if isinstance(value, (tuple, list, slice)):
        return all(map(_is_plain, parts_of(value)))
    return isinstance(value, _PLAIN)


def parts_of(value: Any) -> Any:
    """The items of a list or tuple, or the ends of a slice."""
    return _ENDS(value) if isinstance(value, slice) else value


def settings_of(module: Module) -> Settings:
    """Names and values of a module's plain attributes, which its layer rule may read.

    Lists are copied, because they may be changed in place.
    """
    settings = {
        name: [*value] if isinstance(value, list) else value
        for name, value in module.__dict__.items()
        if name not in MODULE_ATTRIBUTES
        and _is_plain(value)
        and name not in OUR_ATTRIBUTES
        and not (isinstance(value, list) and name[0] == "_")
    }
    return Settings(tuple(settings), tuple(settings.values()))


class Traits:
    """What a call notes about its module, besides tensors.

    Attributes:
        resolved: The layer rule of the module, with its provenance.
        settings: Names and values of its plain attributes.
        is_whole: Whether no covered parameter is a plain attribute, as computed ones are.
    """

    def __init__(self, module: Module, resolved: Any) -> None:
        self.resolved = resolved
        self.settings = NO_SETTINGS if resolved.is_fallback else settings_of(module)
        self.is_whole = module.__dict__.keys().isdisjoint(resolved.params)


def as_it_was(module: Module, settings: Settings, owned: Owned) -> Module:
    """The module with the state of a forward pass: itself if it is unchanged, otherwise a stand-in.

    Args:
        module: The module.
        settings: What :func:`settings_of` returned in the forward pass.
        owned: Its tensors in the forward pass, each with its version counter.
    """
    names, values = settings
    attributes = module.__dict__
    if "_parameters" not in attributes:  # a compiled module keeps its tensors elsewhere
        return module
    missing = (None, 0)
    tables = [attributes[table] for table in ("_parameters", "_buffers")]
    if (
        all(name in attributes for name in names)
        and tuple([attributes[name] for name in names]) == values
        and all(t is owned.get(n, missing)[0] for table in tables for n, t in table.items())
    ):
        return module
    stand_in = object.__new__(type(module))
    stand_in.__dict__.update(attributes)
    stand_in.__dict__.update(zip(names, values, strict=True))
    for name, table in zip(("_parameters", "_buffers"), tables, strict=True):
        stand_in.__dict__[name] = {n: owned.get(n, missing)[0] for n in table}
    return stand_in
