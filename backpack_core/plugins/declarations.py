"""Checks a plugin's class before it is used. Imports no plugin.

Libraries add judges of what classes declare: see ``contract/bases.py``.
"""

from __future__ import annotations

import inspect

from torch.nn import Module

from backpack_core.contract.bases import JUDGES, call_fault
from backpack_core.contract.rules import MODULE_TYPES, LayerRule
from backpack_core.errors import PluginError, nearest
from backpack_core.plugins.manager import hooks


def refuse(cls: type) -> None:
    """Raise if a rule, extension or propagator cannot be used as it is declared.

    Raises:
        PluginError: It is abstract, or a judge finds a fault.
    """
    missing = getattr(cls, "__abstractmethods__", ())
    if missing:
        near = nearest(min(missing), vars(cls)) or "."
        raise PluginError(f"{cls.__name__} does not implement {', '.join(sorted(missing))}{near}")
    found = [text for judge in JUDGES for text in judge(cls)]
    if issubclass(cls, LayerRule):
        if not getattr(cls, "module_types", ()):
            found.append(f"module_types must name {MODULE_TYPES}. Got ()")
        if fault := call_fault(cls, 0):
            found.append(f"a rule is made without arguments, as {cls.__name__}(): {fault}")
    _raise(cls, found)


def advise(cls: type, module: Module | None = None, who: object = "") -> None:
    """Raise if a plugin that validates classes finds a fault, which its author may have missed.

    Args:
        cls: A class that is registered by hand, or that of a rule.
        module: The first module of a type that the rule speaks for.
        who: Who provided it, for the message.

    Raises:
        PluginError: One does.
    """
    answers = hooks.backpack_validate(kind=cls, module=module)
    found = [text for answer in answers for text in answer]
    _raise(cls, found, f" of {who}" if who else "")


def _raise(cls: type, found: list[str], whose: str = "") -> None:
    if found:
        raise PluginError(f"{described(cls)}{whose}: {'; '.join(found)}.".replace("?.", "?"))


def described(cls: type) -> str:
    """A class, with the line where it is written if Python knows that."""
    try:
        return f"{cls.__qualname__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return f"{cls.__qualname__} of {cls.__module__}"
