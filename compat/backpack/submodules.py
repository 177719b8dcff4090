"""Makes submodules from tables: import paths need no files of their own. Imports nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def submodule(name: str, members: Mapping[str, Any], doc: str = "") -> ModuleType:
    """Create a module that supports import, pickle and introspection.

    Args:
        name: Full name; its parent must exist.
        members: What the module holds, by name.
        doc: Its docstring.

    Returns:
        The module, entered in ``sys.modules`` and in its parent.
    """
    module = ModuleType(name, doc or f"Names of ``{name}``; see :mod:`backpack`.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []  # so that it can have submodules
    module.__dict__.update(members)
    module.__dict__["__all__"] = [key for key in members if not key.startswith("_")]
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, module)
    return module


def make_class(module: str, name: str, bases: tuple[type, ...], doc: str, **namespace: Any) -> type:
    """Create a class that says it lives in ``module``.

    Args:
        module: Full name of the module that will hold it.
        name: Its name.
        bases: Its base classes.
        doc: Its docstring.
        namespace: Its attributes.
    """
    return type(name, bases, {"__module__": module, "__doc__": doc, **namespace})
