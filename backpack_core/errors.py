"""Every exception and warning of the library, one tree each. Imports nothing.

    BackpackError
    ├── UsageError            (ValueError)           the call makes no sense as written
    │   └── NotAnExtensionError (TypeError too)
    ├── NotExtendedError      (RuntimeError)         a needed module or loss was not extended
    ├── StoredIOError         (RuntimeError)         inputs or outputs are gone or were overwritten
    │   ├── ReleasedIOError
    │   └── OverwrittenInputError
    ├── UnsupportedError      (NotImplementedError)  no exact answer exists for what was asked
    │   ├── SampleMixingError
    │   └── BridgeError
    ├── ShapeError            (ValueError)           a rule or extension returned a wrong shape
    ├── InternalError         (AssertionError)       a check of the library on itself failed
    └── PluginError           (RuntimeError)
        ├── PluginLoadError
        ├── PluginConflictError
        ├── PluginVersionError
        ├── PluginCodeError
        │   └── UnsupportedByPluginError (NotImplementedError)
        └── MissingPluginError (ImportError)

    BackpackWarning           (UserWarning)
    ├── AutodiffFallbackWarning
    ├── UncoveredParameterWarning
    ├── ZeroCurvatureWarning
    ├── RangeWarning
    └── BrokenPluginWarning

Subclasses inherit the builtin that a caller would expect to catch. A message says what was asked,
what was found, and what to do. A warning points at the line of the user's own code.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Iterable
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_stack
from typing import Any


def entry(kind: type) -> str:
    """The name under which the manual explains an error or warning.

    It is that of the nearest class here, or of a library that says ``in_manual = True`` in it.
    """
    bases = (b for b in kind.__mro__ if b.__module__ == __name__ or "in_manual" in vars(b))
    return next(bases).__name__


class BackpackError(Exception):
    """Base class of all errors raised by this library.

    From Python 3.11 on, a traceback ends with the command that explains the kind of error.
    """

    def __init__(self, *args: object, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__notes__ = [f"Read more: backpack trouble {entry(type(self))}"]


class UsageError(BackpackError, ValueError):
    """The request makes no sense as written; the message says how to write it."""


class NotAnExtensionError(UsageError, TypeError):
    """An argument of ``backpack(...)`` is not an instance of an extension."""


class NotExtendedError(BackpackError, RuntimeError):
    """A module or a loss that is needed was not passed through ``extend``."""


class StoredIOError(BackpackError, RuntimeError):
    """A tensor that a module received or returned in the forward pass is not available."""


class ReleasedIOError(StoredIOError):
    """The inputs were freed by an earlier backward pass without ``retain_graph``."""


class OverwrittenInputError(StoredIOError):
    """A stored tensor was changed in place after the forward pass."""


class UnsupportedError(BackpackError, NotImplementedError):
    """The quantity has no exact value here, or no rule knows it."""


class SampleMixingError(UnsupportedError):
    """Samples of the batch influence each other, so per-sample quantities do not exist."""


class BridgeError(UnsupportedError):
    """A quantity cannot be carried through an autograd node exactly.

    Attributes:
        node: The node; ``None`` if there is no single one.
    """

    node: Any = None


class ShapeError(BackpackError, ValueError):
    """A rule or an extension returned, or was given, a tensor of the wrong shape."""


class InternalError(BackpackError, AssertionError):
    """A check of the library on itself failed, and results would be wrong: please report it."""

    def __init__(self, what: str, *more: object) -> None:
        super().__init__(
            f"{what} This is a fault of the library: please report it, with the model and the "
            "call of backward(). Other extensions, or single ones, may work until it is mended.",
            *more,
        )


class PluginError(BackpackError, RuntimeError):
    """Base class of all errors about plugins."""


class PluginLoadError(PluginError):
    """A plugin failed while it was imported or registered."""


class PluginConflictError(PluginError):
    """Two plugins claim the same layer, extension or propagator."""


class PluginVersionError(PluginError):
    """A plugin was written for another version of the plugin interface."""


class PluginCodeError(PluginError):
    """Code of a plugin raised an exception of its own, which is the cause (``__cause__``).

    Attributes:
        backpack_context: Extension, module, rule, and the plugins that provided them.
    """

    backpack_context = ""


class UnsupportedByPluginError(PluginCodeError, NotImplementedError):
    """Code of a plugin raised ``NotImplementedError``, which is the cause."""


class MissingPluginError(PluginError, ImportError):
    """No installed plugin provides what was asked for."""


class BackpackWarning(UserWarning):
    """Base class of all warnings of this library."""


class AutodiffFallbackWarning(BackpackWarning):
    """A module has no layer rule. Results are exact, but a rule may be faster.

    Install a plugin that has a rule for the module, or write one.
    """


class UncoveredParameterWarning(BackpackWarning):
    """A parameter is used only by functional calls, which no module owns: it gets no quantity.

    Move the parameter into a module of its own.
    """


class ZeroCurvatureWarning(BackpackWarning):
    """A loss is linear in its input, so the generalised Gauss-Newton matrix is zero.

    Use a loss that has curvature: CrossEntropyLoss on the logits instead of NLLLoss on the
    logarithms of probabilities, which is the same model.
    """


class RangeWarning(BackpackWarning):
    """A quantity overflowed to infinity or underflowed to zero in its dtype.

    Scale the loss, or use double precision.
    """


class BrokenPluginWarning(BackpackWarning):
    """An installed plugin could not be loaded. ``backpack doctor`` shows why."""


# Folders of library code: this package, and later those of torch and of plugins.
_LIBRARY = {str(Path(__file__).parent)}
# The keys for which :func:`warn_once` has warned.
warned: set[Hashable] = set()


def add_library_folder(file: str) -> None:
    """Count the folder of a file as library code; warnings do not point there."""
    _LIBRARY.add(str(Path(file).parent))


def is_library(filename: str) -> bool:
    """Whether a file belongs to a library and not to the user."""
    return filename.startswith((*_LIBRARY, "<"))


def warn_once(key: Hashable, message: str, category: type[Warning]) -> None:
    """Warn at the user's line, the first time that ``key`` occurs."""
    if key not in warned:
        warned.add(key)
        warn(message, category)


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line that belongs to the user; if there is none, at ours."""
    if issubclass(category, BackpackWarning):
        message = f"{message}\nRead more: backpack trouble {entry(category)}"
    stack = enumerate(walk_stack(sys._getframe(1)), start=2)
    users = (level for level, (frame, _) in stack if not is_library(frame.f_code.co_filename))
    warnings.warn(message, category, stacklevel=next(users, 2))


def nearest(name: str, names: Iterable[str]) -> str:
    """``": did you mean 'weight'?"``, or an empty string if no name is near."""
    by_lower = {other.lower(): other for other in names}
    close = get_close_matches(name.lower(), by_lower, 3, 0.6)
    # Names with the same letters in another order come first.
    close.sort(key=lambda other: sorted(other) != sorted(name.lower()))
    return f": did you mean {by_lower[close[0]]!r}?" if close and by_lower[close[0]] != name else ""
