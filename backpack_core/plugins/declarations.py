"""Refuses a plugin's class that cannot be used as it is declared.

The base classes are the table: an attribute with a value is a declaration, and its default shows
its type. What only helps an author is asked of plugins (``backpack_validate``). Imports no plugin.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack_core.contract.bases import BASES, ITEMS, declared
from backpack_core.contract.operation import Operation
from backpack_core.contract.rules import MODULE_TYPES, LayerRule, is_module_type
from backpack_core.errors import PluginError, nearest
from backpack_core.plugins.manager import hooks

ITEMS["module_types"] = MODULE_TYPES, is_module_type
ITEMS["needs"] = "operations", lambda item: isinstance(item, Operation)


def refuse(cls: type, by_hand: bool = False) -> None:
    """Raise if a rule, extension or propagator cannot be used as it is declared.

    Args:
        cls: A class derived from one of the base classes.
        by_hand: Whether it is registered by its author, at work.

    Raises:
        PluginError: It is abstract, a declaration is of the wrong kind, or a plugin that validates
            classes finds a fault.
    """
    missing = getattr(cls, "__abstractmethods__", ())
    if missing:
        near = nearest(min(missing), vars(cls)) or "."
        raise PluginError(f"{cls.__name__} does not implement {', '.join(sorted(missing))}{near}")
    found = [text for name, value in declared(cls).items() for text in _fault(cls, name, value)]
    if issubclass(cls, LayerRule) and not getattr(cls, "module_types", ()):
        found.append(f"module_types must name {MODULE_TYPES}. Got ()")
    if found:
        raise _error(cls, "", found)
    validate(cls, by_hand=by_hand)


def validate(
    cls: type, module: Module | None = None, by_hand: bool = False, who: object = ""
) -> None:
    """Raise if a plugin that validates classes finds a fault.

    Args:
        cls: The class.
        module: The first module of a type that it, a rule, speaks for.
        by_hand: Whether it is registered by its author, at work.
        who: Who provided it, for the message.

    Raises:
        PluginError: One does.
    """
    answers = hooks.backpack_validate(kind=cls, module=module, by_hand=by_hand)
    found = [text for answer in answers for text in answer]
    if found:
        raise _error(cls, f" of {who}" if who else "", found)


def _error(cls: type, who: str, found: list[str]) -> PluginError:
    return PluginError(f"{described(cls)}{who}: {'; '.join(found)}.".replace("?.", "?"))


def described(cls: type) -> str:
    """A class, with the line where it is written if Python knows that."""
    try:
        return f"{cls.__qualname__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return f"{cls.__qualname__} of {cls.__module__}"


def known() -> dict[str, Any]:
    """Every attribute of every base class, with its default."""
    return _known((*BASES,))


@cache
def _known(bases: tuple[type, ...]) -> dict[str, Any]:
    return {n: v for base in bases for cls in base.__mro__[-2::-1] for n, v in vars(cls).items()}


def _fault(cls: type, name: str, value: Any) -> Iterator[str]:
    kinds = (property, classmethod, staticmethod, *(() if name in ITEMS else (type,)))
    bases = [vars(c) for c in cls.__mro__ if c in BASES]
    if not isinstance(value, kinds) and any(name in base for base in bases):
        yield from _wrong_kind(name, value, known()[name])


def _wrong_kind(name: str, value: Any, default: Any) -> Iterator[str]:
    if name in ITEMS:
        what, accepts = ITEMS[name]
        wrong = [v for v in value if not accepts(v)] if isinstance(value, tuple) else [value]
        one = value.__name__ if isinstance(value, type) else repr(value)
        if isinstance(value, tuple) and wrong:
            yield f"{name} must be a tuple of {what}. Got {value!r}, with {wrong[0]!r}"
        elif wrong:
            alone = f": write {name} = ({one},)" if accepts(value) else ""
            yield f"{name} must be a tuple of {what}. Got {value!r}{alone}"
    elif isinstance(default, (bool, str)) and not isinstance(value, type(default)):
        yield f"{name} must be a {type(default).__name__}. Got {value!r}"
    elif name == "degree" and not isinstance(value, (int, float, NoneType)):
        yield f"degree must be a number, or None. Got {value!r}"
    elif name == "savefield" and value and not value.isidentifier():
        yield f"savefield must be a Python identifier. Got {value!r}"
    elif name == "savefield" and hasattr(Tensor, value or "-"):
        yield f"savefield {value!r} would hide torch.Tensor.{value} of the parameters"
