"""The base classes that plugins derive from, and the judges of what a plugin's class declares.

The core marks its own base classes, and libraries those that they add for authors: methods written
there are trusted, and not guarded. A judge is a function that finds faults in a class. A library
that adds declarations, or knows the usual mistakes of authors, adds a judge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from torch.nn import Module

from backpack_core.errors import PluginError, nearest

C = TypeVar("C", bound=type)

BASES: Final[dict[type, None]] = {}  # in the order in which they were defined


class Candidate(NamedTuple):
    """The class of a plugin that judges look at.

    Attributes:
        cls: The class.
        module: For a rule that is about to be used: the first module of a type that it is for.
        is_new: Whether the class was registered by hand, so that its author is at work. Judges
            that look for likely mistakes skip installed classes, which may be written for
            another version of a library.
    """

    cls: type
    module: Module | None = None
    is_new: bool = False


# Returns the faults of a class, one sentence each.
Judge: TypeAlias = Callable[[Candidate], Iterable[str]]

JUDGES: Final[list[Judge]] = []


def base(cls: C) -> C:
    """Class decorator that marks a base class of plugins."""
    BASES[cls] = None
    return cls


def judge(function: Judge) -> Judge:
    """Decorator that adds a judge, who is asked about every class that is registered or used.

    It is asked about a rule again with the first module of each type that the rule is for.
    """
    JUDGES.append(function)
    return function


def vet(cls: type, module: Module | None = None, is_new: bool = False, who: object = "") -> None:
    """Raise an error if a rule, extension or propagator cannot be used as declared.

    Args:
        cls: The class.
        module: As in :class:`Candidate`.
        is_new: As in :class:`Candidate`.
        who: Who provided it, for the message.

    Raises:
        PluginError: It is abstract, or a judge finds a fault.
    """
    if faults := faults_of(Candidate(cls, module, is_new)):
        whose = f" of {who}" if who else ""
        raise PluginError(f"{with_line(cls)}{whose}: {'; '.join(faults)}.".replace("?.", "?"))


def faults_of(candidate: Candidate) -> list[str]:
    """The faults that all judges find, one sentence each; those of an abstract class come first."""
    if missing := sorted(getattr(candidate.cls, "__abstractmethods__", ())):
        near = nearest(missing[0], vars(candidate.cls)).replace("you mean", "you mean it by", 1)
        return [f"it does not implement {', '.join(missing)}{near}"]
    return [text for each in JUDGES for text in each(candidate)]


def with_line(cls: type) -> str:
    """The name of a class, with the line of its definition if Python knows it."""
    try:
        return f"{cls.__qualname__} ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return f"{cls.__qualname__} of {cls.__module__}"


def is_of_base(function: Any) -> bool:
    """Whether a function was written in the module of a base class, wrapped or not."""
    written = getattr(function, "__globals__", {}).get("__name__")
    return any(cls.__module__ == written for cls in BASES)
