"""One step by the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from backpack_core import View, backpack
from backpack_core.engine.active import current
from backpack_core.errors import UsageError
from backpack_core.record.storage import storage


class Observer(Protocol):
    """Observes one pass, and returns what it found."""

    def __call__(self, view: View) -> None:
        """Receive the view of a visited output."""

    def found(self) -> Any:
        """Tensors and numbers, in lists, tuples and dictionaries. They are part of the step."""


@dataclass(frozen=True)
class Asked:
    """What ``backpack(...)`` is asked for in every step.

    Attributes:
        observer: Makes an observer for each pass. Its findings follow the step's own results.
    """

    extensions: tuple[Any, ...]
    gradient: Any
    check: Any
    hook: Callable[[Module], None] | None = None
    observer: Callable[[], Observer] | None = None

    @property
    def fields(self) -> list[str]:
        """The names of results."""
        return [extension.savefield for extension in self.extensions]

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """What else a step calls, in addition to the user's function."""
        return [called for called in (self.hook, self.observer) if called is not None]

    def block(self, observer: Observer | None = None) -> backpack:
        """The context."""
        return backpack(
            *self.extensions,
            gradient=self.gradient,
            check=self.check,
            extension_hook=self.hook,
            observer=observer,
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step.

    Attributes:
        returned: What the function returned, detached.
        was_measured: Whether the pass was measured, as the first ones are.
    """

    returned: Any
    was_measured: bool


def run_engine(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asked: Asked,
    between: Callable[[], None] = lambda: None,
) -> Outcome:
    """Forward pass, loss, and backward pass; ``between`` is called before the last."""
    observer = None if asked.observer is None else asked.observer()
    with storage().block(is_asked=False):  # compiled code runs as it was written
        returned = function(*args, **kwargs)  # outside our block: it may differentiate the net
    loss = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"A captured step returns its loss, or a tuple that begins with it. Got {loss!r}."
        )
    if loss.numel() != 1 or not loss.requires_grad:
        found = f"shape {[*loss.shape]}" if loss.numel() != 1 else "no graph"
        raise UsageError(
            "A captured step calls backward() on the loss that it returns, alone or first in a "
            f"tuple, but that has {found}. Return a single number, loss.sum() or loss.mean(), "
            "without .detach(), and call the step outside of torch.no_grad()."
        )
    with asked.block(observer):
        context = current(threading.get_ident())
        if context is not None:
            context.seen.add("captured")  # only by the engine, since graphs are compared with it
        between()
        loss.backward()
        was_measured = context is not None and "measured" in context.seen
        if observer is not None:
            returned = returned, observer.found()
    return Outcome(detached(returned), was_measured)


def detached(value: Any) -> Any:
    """Nested values without their graph."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(detached, value))
    if type(value) in (list, tuple):
        return type(value)(map(detached, value))
    if type(value) is dict:
        return {name: detached(item) for name, item in value.items()}
    return value
