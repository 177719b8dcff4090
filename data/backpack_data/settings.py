"""Settings of losses and extensions in words: what tells runs apart."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import Extension, Propagator
from backpack_data.shards import local
from backpack_products.ranks import checksum

_WORDS: Final = (
    *(str, int, float, complex, bytes, type(None), Enum, Propagator),
    *(torch.dtype, torch.device, torch.layout),
)
_DEEPEST: Final = 6  # levels of containers and objects


def qualified(given: Any) -> str:
    """The name of a class or a function; of another object, that of its class."""
    given = given if hasattr(given, "__qualname__") else type(given)
    return f"{given.__module__}.{given.__qualname__}"


def plain_settings(module: Module) -> str:
    """What kind of loss it is, and its attributes that are numbers or words."""
    plain = (str, int, float, tuple)
    settings = {key: value for key, value in vars(module).items() if isinstance(value, plain)}
    return f"{type(module).__name__}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"


def settings_of(extension: Extension) -> str:
    """What kind of extension it is, and all its settings: tensors, and objects that hold some, too.

    A tensor that is not an argument of the class is a result of the last pass, ``None`` before it.
    """
    taken = inspect.signature(type(extension)).parameters
    settings = {
        key: _told(value, _DEEPEST)
        for key, value in vars(extension).items()
        if key in taken or not (value is None or isinstance(value, Tensor))
    }
    return f"{type(extension).__name__}({', '.join(f'{k}={v}' for k, v in settings.items())})"


def _told(value: Any, deepest: int) -> str:
    """A value in words that differ for other values."""
    if isinstance(value, _WORDS):
        return repr(value)
    if isinstance(value, Tensor):
        return f"tensor {checksum(local(value)):08x}"
    if hasattr(value, "__qualname__") or not deepest:  # a function, a class
        return qualified(value)
    if hasattr(value, "state_dict"):  # gradients as products, matrices
        value = {"": type(value), **value.state_dict()}
    if isinstance(value, Mapping):
        pairs = [(_told(k, deepest - 1), _told(v, deepest - 1)) for k, v in value.items()]
        return f"{{{', '.join(f'{key}: {part}' for key, part in pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_told(part, deepest - 1) for part in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_told(part, deepest - 1) for part in value))}}}"
    if hasattr(value, "__array__"):
        return _told(torch.as_tensor(value), deepest)
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    attributes = {name: getattr(value, name) for name in names if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    return f"{qualified(value)}{_told(attributes, deepest - 1)}"
