"""What is active on which thread: the contexts that hooks of a backward pass look up.

Every user thread has a stack of contexts. Autograd runs hooks of CPU graphs on the thread that
called backward, and those of CUDA graphs on device threads of its own, which see neither
thread-locals nor ContextVars. So the stacks lie in one table by thread: a thread that Python did
not start looks up the thread that ran the forward pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakValueDictionary

from torch.nn import Module

from backpack_core._torch import Node
from backpack_core.contract.extension import Extension
from backpack_core.contract.graph_extension import GraphExtension
from backpack_core.engine.groups import Group, Watch, unwatched
from backpack_core.record.view import View

ExtensionHook = Callable[[Module], None]
Check = Literal["first", "always", "never"]
Gradient = Literal["autograd", "shared", "none", "skipped"]

logger = logging.getLogger("backpack_core")


@dataclass(frozen=True, eq=False, repr=False)
class Context:
    """What one ``with backpack(...)`` block asked for.

    Attributes:
        extensions: The active extensions, in the order they were given.
        extension_hook: Called with each module after all extensions ran on it.
        debug: Whether to log.
        check: In which passes alignment is measured.
        retain_graph: Whether inputs and outputs are kept for another backward pass.
        beside: Outputs of nodes that are no part of the loss that quantities are of.
        observer: Called with what a rule sees of each output that is visited.
        gradient: Where the gradient of the parameters comes from.
        watch: Who calls what takes time.
        groups: The extensions by propagator: each propagator is pushed once.
        graph_extensions: Those that read the loss as a whole.
        passes: State of the backward passes under way, by autograd's graph-task id; owned by
            autograd, or by whoever saw the call of ``backward()``.
        announced: Passes whose ``backward()`` was seen and has not returned yet, innermost last.
    """

    extensions: tuple[Extension, ...] = ()
    extension_hook: ExtensionHook | None = None
    debug: bool = False
    check: Check = "first"
    retain_graph: bool = False
    beside: frozenset[tuple[Node, int]] = frozenset()
    observer: Callable[[View], None] | None = None
    gradient: Gradient = "autograd"
    watch: Watch = unwatched
    groups: tuple[Group, ...] = ()
    graph_extensions: tuple[GraphExtension, ...] = ()
    passes: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    announced: list[Any] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def __repr__(self) -> str:
        """What was asked for, and what is under way."""
        names = ", ".join(type(extension).__name__ for extension in self.extensions)
        return f"<context of {names or 'no extensions'}, {len(self.passes)} passes under way>"


# By thread; none is empty.
stacks: dict[int, tuple[Context, ...]] = {}


def current(forward_thread: int) -> Context | None:
    """The context that applies to a hook running on this thread.

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


def push(context: Context) -> None:
    """Make a context the innermost one of this thread."""
    ident = threading.get_ident()
    stacks[ident] = (*stacks.get(ident, ()), context)


def pop(context: Context) -> None:
    """Remove a context, or one made of it by ``dataclasses.replace``, from this thread."""
    ident = threading.get_ident()
    # By what they have seen, which a replacement shares.
    remaining = tuple(c for c in stacks.get(ident, ()) if c.seen is not context.seen)
    if remaining:
        stacks[ident] = remaining
    else:
        stacks.pop(ident, None)


@contextmanager
def suspended() -> Iterator[None]:
    """No context applies to the backward passes of this thread inside the ``with`` block."""
    ident = threading.get_ident()
    stack = stacks.pop(ident, None)
    try:
        yield
    finally:
        if stack is not None:
            stacks[ident] = stack


def _is_foreign_thread() -> bool:
    """Whether this thread was not started by Python's ``threading``: one of autograd's own."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _is_alive(ident: int) -> bool:
    # A new thread, this one for example, may have got the number of one that has ended.
    this = threading.current_thread()
    return any(thread.ident == ident for thread in threading.enumerate() if thread is not this)


def log_visit(view: View) -> None:
    """Say where a backward pass is."""
    shape, rule, who = list(view.output_shape), type(view.call.rule), view.call.provenance
    logger.info("%s: output %s, rule %s of %s", view.path, shape, rule.__name__, who)
