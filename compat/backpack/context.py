"""``CTX``: reads and changes the core's context that is active on this thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

from torch.nn import Module

from backpack_core import unextend
from backpack_core.contract.extension import Extension
from backpack_core.engine import active as core
from backpack_core.engine.active import group


def no_op(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


class ExtendedHandle:
    """Removes what ``extend`` installed on a module; does not keep the module alive."""

    def __init__(self, module: Module) -> None:
        self._module = weakref.ref(module)

    def remove(self) -> None:
        """Remove it."""
        module = self._module()
        if module is not None:
            unextend(module)


class CTX:
    """The settings of backward passes on this thread.

    Inside ``with backpack(...)`` they are those of the block; setters change them until it ends.
    Outside, setters hold until they are called again.
    """

    hook_handles: ClassVar[list[Any]] = []

    @staticmethod
    def set_active_exts(active_exts: Iterable[Extension]) -> None:
        """Set the active extensions."""
        extensions = tuple(active_exts)
        groups, whole = group(extensions, _current().watch)
        _set(extensions=extensions, groups=groups, whole=whole)

    @staticmethod
    def get_active_exts() -> tuple[Extension, ...]:
        """The active extensions."""
        return _current().extensions

    @staticmethod
    def is_extension_active(*extension_classes: type[Any]) -> bool:
        """Whether an instance of one of the classes is active."""
        return any(isinstance(ext, extension_classes) for ext in CTX.get_active_exts())

    @staticmethod
    def get_debug() -> bool:
        """Whether debug mode is on."""
        return _current().debug

    @staticmethod
    def set_debug(debug: bool) -> None:
        """Switch debug mode."""
        _set(debug=debug)

    @staticmethod
    def get_extension_hook() -> Callable[[Module], None]:
        """The hook that runs on each module after all extensions."""
        hook = _current().extension_hook
        return no_op if hook is None else getattr(hook, "hook", hook)

    @staticmethod
    def set_extension_hook(extension_hook: Callable[[Module], None]) -> None:
        """Set the hook that runs on each module after all extensions."""
        _set(extension_hook=None if extension_hook is no_op else extension_hook)

    @staticmethod
    def get_retain_graph() -> bool:
        """Whether inputs and outputs are kept for another backward pass."""
        return _current().retain_graph

    @staticmethod
    def set_retain_graph(retain_graph: bool) -> None:
        """Set whether inputs and outputs are kept for another backward pass."""
        _set(retain_graph=retain_graph)

    @staticmethod
    def add_hook_handle(hook_handle: Any) -> None:
        """Remember a handle for :meth:`remove_hooks`."""
        CTX.hook_handles.append(hook_handle)

    @staticmethod
    def remove_hooks() -> None:
        """Undo every ``extend``: remove all hooks of all modules."""
        for handle in CTX.hook_handles:
            handle.remove()
        CTX.hook_handles.clear()


_MADE_HERE = "set through CTX"
_NOTHING = core.Context()


def _current() -> core.Context:
    return core.current(threading.get_ident()) or _NOTHING


def _set(**changes: Any) -> None:
    """Replace the innermost context of this thread by one with changes."""
    before = core.current(threading.get_ident())
    after = replace(before or core.Context(seen={_MADE_HERE}), **changes)
    settings = (after.extensions, after.extension_hook, after.debug, after.retain_graph)
    is_default = _MADE_HERE in after.seen and not any(settings)
    if before is not None:
        core.pop(before)
    if not is_default:
        core.push(after)
