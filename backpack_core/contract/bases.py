"""The base classes that plugins derive from, and the judges of what a plugin's class declares.

Core marks its own bases, and libraries those that they add for authors. What they do themselves
needs nobody to watch. A library that declares more, or knows what authors get wrong, adds a judge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from torch.nn import Module

from backpack_core.errors import PluginError, nearest

C = TypeVar("C", bound=type)

BASES: Final[dict[type, None]] = {}  # in the order in which they were defined
_ONLY_COMPUTING: Final = {__name__.partition(".")[0]}  # packages


class Candidate(NamedTuple):
    """A plugin's class, as judges see it.

    Attributes:
        cls: The class.
        module: For a rule that is about to be used: the first module of a type that it speaks for.
        is_new: Whether it was registered by hand, so that its author is at work. What a user has
            installed is not refused for what may be meant for another version of a library.
    """

    cls: type
    module: Module | None = None
    is_new: bool = False


# Says what is wrong with a class, a sentence for each fault.
Judge: TypeAlias = Callable[[Candidate], Iterable[str]]

JUDGES: Final[list[Judge]] = []


def base(cls: C) -> C:
    """Mark a class as one that plugins derive from."""
    BASES[cls] = None
    return cls


def declare_only_computes(package: str) -> None:
    """Say that rules, extensions and propagators of a package do nothing else than compute tensors.

    What they compute depends on nothing but what they are given, and their own plain attributes.
    So a library may have a later pass run the same operations, without calling them: then what they
    count, print or keep is not counted, printed or kept.

    Args:
        package: The top-level package; a class derived elsewhere is of that other package.
    """
    _ONLY_COMPUTING.add(package)


def only_computes(cls: type) -> bool:
    """Whether the package of a class has called :func:`declare_only_computes`."""
    return cls.__module__.partition(".")[0] in _ONLY_COMPUTING


def judge(function: Judge) -> Judge:
    """Ask a function about every class that is registered or used, and each rule once more.

    A rule is looked at again with the first module of each type that it speaks for.
    """
    JUDGES.append(function)
    return function


def vet(cls: type, module: Module | None = None, is_new: bool = False, who: object = "") -> None:
    """Raise if a rule, extension or propagator cannot be used as it is declared.

    Args:
        cls: The class.
        module: As in :class:`Candidate`.
        is_new: As in :class:`Candidate`.
        who: Who provided it, for the message.

    Raises:
        PluginError: It is abstract, or a judge finds a fault.
    """
    missing = getattr(cls, "__abstractmethods__", ())
    if missing:
        near = nearest(min(missing), vars(cls)) or "."
        raise PluginError(f"{cls.__name__} does not implement {', '.join(sorted(missing))}{near}")
    if faults := faults_of(Candidate(cls, module, is_new)):
        whose = f" of {who}" if who else ""
        raise PluginError(f"{with_line(cls)}{whose}: {'; '.join(faults)}.".replace("?.", "?"))


def faults_of(candidate: Candidate) -> list[str]:
    """What all judges find."""
    return [text for each in JUDGES for text in each(candidate)]


def with_line(cls: type) -> str:
    """The name of a class, with the line where it is written if Python knows that."""
    try:
        return f"{cls.__qualname__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return f"{cls.__qualname__} of {cls.__module__}"


def is_of_base(function: Any) -> bool:
    """Whether a function was written beside a base class; a wrapper does not take its place."""
    written = getattr(function, "__globals__", {}).get("__name__")
    return any(cls.__module__ == written for cls in BASES)
