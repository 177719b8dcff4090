"""What a ``with backpack(...)`` block asks for, and which block is active on which thread.

Extensions that share a propagator are a group: one quantity travels for all of them.

Every thread of the user has a stack of contexts. Autograd runs the hooks of CPU graphs on the
thread that called ``backward()``, and those of CUDA graphs on threads of its own, which see neither
thread-locals nor ContextVars. So all stacks lie in one table by thread. A thread that Python did
not start looks up the thread that ran the forward pass.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator
from backpack_core.plugins.registry import registry
from backpack_core.record.view import View

ExtensionHook = Callable[[Module], None]
Check = Literal["first", "always", "never"]
Samples: TypeAlias = Tensor | Sequence[int | Tensor]
Gradient = Literal["autograd", "shared", "none", "skipped"]

logger = logging.getLogger("backpack_core")


@dataclass(eq=False, repr=False)
class Context:
    """What one ``with backpack(...)`` block asks for, and the passes that run in it.

    Attributes:
        extensions: The active extensions, in the order they were given.
        extension_hook: Called with each module after all extensions ran on it.
        debug: Whether to log visits.
        check: In which passes to measure that samples stay apart.
        retain_graph: Whether inputs and outputs are kept for another backward pass.
        beside: Edges of the terms that ``backpack(beside=...)`` leaves out.
        observer: Called with the view of each output that is visited.
        gradient: Where the gradient of the parameters comes from.
        told: Which sample each row belongs to, as ``backpack(samples=...)`` says.
        keeps_results: Whether later passes leave the memory of results alone.
        watch: See :class:`Group`.
        groups: The extensions by propagator; each propagator sends one quantity.
        whole: The extensions that read the graph as a whole, and not at parameters.
        passes: The backward passes under way, by autograd's graph-task id. Autograd owns them, or
            the function that saw the call of ``backward()`` does.
        history: How many passes took a plan, made one, or could not, and why.
        announced: The pass of a ``backward()`` that was seen and has not returned; ``[None]``
            before and after it runs; empty if there is no such pass.
        seen: Words for what happened: ``"ran"`` and ``"trained"`` if modules and their parameters
            took part, ``"measured"`` if a pass looked at more than was asked for, ``"captured"``
            in a captured step. ``dataclasses.replace`` makes contexts that share it with this one.
    """

    extensions: tuple[Extension, ...] = ()
    extension_hook: ExtensionHook | None = None
    debug: bool = False
    check: Check = "first"
    retain_graph: bool = False
    beside: frozenset[tuple[Node, int]] = frozenset()
    observer: Callable[[View], None] | None = None
    gradient: Gradient = "autograd"
    told: Any = None
    keeps_results: bool = False
    watch: Watch | None = None
    groups: tuple[Group, ...] = ()
    whole: tuple[Extension, ...] = ()
    passes: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    announced: list[Any] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    history: Counter[str] = field(default_factory=Counter)

    @cached_property
    def is_idle(self) -> bool:
        """Whether nothing was asked for, as in an empty block."""
        return not (self.extensions or self.extension_hook or self.observer or self.debug)

    @cached_property
    def propagators(self) -> list[Propagator]:
        """The propagators of all extensions."""
        return [*(g.propagator for g in self.groups), *(e.propagator for e in self.whole)]

    @cached_property
    def is_per_sample(self) -> bool:
        """Whether any quantity belongs to single samples, so that samples must not mix."""
        return any(propagator.per_sample for propagator in self.propagators)

    @cached_property
    def is_curvature(self) -> bool:
        """Whether any quantity is curvature of the function that autograd differentiates."""
        return bool(self.whole) or any(group.propagator.travels for group in self.groups)

    @cached_property
    def of_losses(self) -> list[Extension]:
        """The extensions whose quantity is the curvature of extended losses."""
        groups = [g for g in self.groups if g.propagator.travels and not g.has_overrides]
        return [*chain(*(g.extensions for g in groups)), *(e for e in self.whole if e.is_of_losses)]

    @cached_property
    def with_normalisers(self) -> list[Extension]:
        """The extensions that need to know what each loss divides by."""
        return [extension for extension in self.extensions if extension.needs_normalisers]

    def __repr__(self) -> str:
        """The extensions, and how many passes are under way."""
        names = ", ".join(type(extension).__name__ for extension in self.extensions)
        return f"<context of {names or 'no extensions'}, {len(self.passes)} passes under way>"


# The stacks of contexts by thread, none of them empty.
stacks: dict[int, tuple[Context, ...]] = {}


def current(forward_thread: int) -> Context | None:
    """The context for a hook that runs on this thread; ``None`` if there is none.

    Args:
        forward_thread: The thread that ran the forward pass of the call in question.
    """
    if not stacks:
        return None
    stack = stacks.get(threading.get_ident())
    if stack is None and _is_foreign_thread():
        stack = stacks.get(forward_thread)
        if stack is None and len(stacks) == 1 and not _is_alive(forward_thread):
            (stack,) = stacks.values()
    return stack[-1] if stack else None


def innermost() -> Context | None:
    """The innermost context of this thread; ``None`` if there is none."""
    stack = stacks.get(threading.get_ident())
    return None if stack is None else stack[-1]


def push(context: Context) -> None:
    """Make a context the innermost one of this thread."""
    ident = threading.get_ident()
    stacks[ident] = (*stacks.get(ident, ()), context)


def pop(context: Context) -> None:
    """Remove a context, or one that ``dataclasses.replace`` made of it.

    Another thread than the one that entered it may leave it: a generator is closed anywhere. A new
    thread may get the number of one that has ended, and would otherwise find the context there.
    """
    for ident, stack in [*stacks.items()]:
        # Compared by ``seen``, which a replacement shares.
        remaining = tuple(c for c in stack if c.seen is not context.seen)
        if not remaining:
            stacks.pop(ident, None)
        elif len(remaining) < len(stack):
            stacks[ident] = remaining


def _is_foreign_thread() -> bool:
    """Whether autograd has started this thread, and not Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _is_alive(ident: int) -> bool:
    # A new thread may have got the number of one that has ended.
    this = threading.current_thread()
    return any(thread.ident == ident for thread in threading.enumerate() if thread is not this)


Watch = Callable[..., Any]  # called with a module, a class, a word, a function and its arguments


class Group(NamedTuple):
    """Extensions that share a propagator; a *lane* is the index of a group in the list of groups.

    Attributes:
        propagator: What travels for all of them.
        extensions: The extensions, in the order they were given.
        needs: The operations that the extensions will ask of a product.
        has_overrides: Whether carriers other than layer rules may answer for some modules.
        watch: Calls functions in order to measure their time; ``None`` if nothing is measured.
    """

    propagator: Propagator
    extensions: tuple[Extension, ...] = ()
    needs: frozenset[Any] = frozenset()
    has_overrides: bool = False
    watch: Watch | None = None

    @property
    def first(self) -> Extension | None:
        """The extension that error messages name."""
        return self.extensions[0] if self.extensions else None


def group(
    extensions: tuple[Extension, ...], watch: Watch | None = None
) -> tuple[tuple[Group, ...], tuple[Extension, ...]]:
    """Group extensions with equal propagators; one with carriers of its own is a group by itself.

    Args:
        extensions: What was asked for.
        watch: See :class:`Group`.

    Returns:
        The groups, and the extensions that belong to none: they read the graph as a whole.

    Raises:
        PluginConflictError: Several plugins provide a propagator of the same name.
    """
    together: dict[tuple[Propagator, int | None], list[Extension]] = {}
    for extension in extensions:
        if not extension.is_whole:
            registry.refuse_rivals(type(extension.propagator))
            is_alone = bool(extension.carriers) or registry.has_overrides(type(extension))
            key = extension.propagator, id(extension) if is_alone else None
            together.setdefault(key, []).append(extension)
    groups = []
    for (propagator, alone), group in together.items():
        needs = frozenset().union(*[extension.needs for extension in group])
        serving = propagator.serving(tuple(group))
        groups.append(Group(serving, tuple(group), needs, alone is not None, watch))
    return tuple(groups), tuple([e for e in extensions if e.is_whole])
