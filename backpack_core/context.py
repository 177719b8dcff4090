"""The contexts ``backpack(...)`` and ``disable()``. Imports core's extensions, never the engine.

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
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from torch.nn import Module
from torch.utils.checkpoint import CheckpointError

from backpack_core.errors import BridgeError, NotAnExtensionError, NotExtendedError, UsageError
from backpack_core.extension import Extension, Propagator

ExtensionHook = Callable[[Module], None]

logger = logging.getLogger("backpack_core")


@dataclass(frozen=True, eq=False, repr=False)
class Context:
    """What one ``with backpack(...)`` block asked for.

    Attributes:
        extensions: The active extensions, in the order they were given.
        extension_hook: Called with each module after all extensions ran on it.
        debug: Whether to log, and to probe that samples do not mix.
        retain_graph: Whether inputs and outputs are kept for another backward pass.
        groups: The extensions by propagator: each propagator is pushed once.
        passes: State of the backward passes under way, by autograd's graph-task id. Autograd owns
            it.
    """

    extensions: tuple[Extension, ...]
    extension_hook: ExtensionHook | None
    debug: bool
    retain_graph: bool
    groups: tuple[tuple[Propagator, tuple[Extension, ...]], ...]
    passes: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    seen: set[str] = field(default_factory=set)


_STACKS: dict[int, tuple[Context, ...]] = {}
_local = threading.local()


def current(forward_thread: int) -> Context | None:
    """The context that applies to a hook running on this thread.

    Args:
        forward_thread: The thread that ran the forward pass of the call in question.
    """
    if not _STACKS:
        return None
    stack = _STACKS.get(threading.get_ident())
    if stack is None and _is_foreign_thread():
        stack = _STACKS.get(forward_thread)
        if stack is None and len(_STACKS) == 1 and not _is_alive(forward_thread):
            (stack,) = _STACKS.values()
    return stack[-1] if stack else None


def exchange(before: Context | None, after: Context | None) -> None:
    """Put a context in the place of the innermost one of this thread.

    Args:
        before: The innermost context, or ``None`` outside of any block.
        after: The new one, made from it by ``dataclasses.replace``; ``None`` removes it.
    """
    ident = threading.get_ident()
    stack = _STACKS.get(ident, ())
    outer = stack if before is None else stack[:-1]
    _STACKS[ident] = outer if after is None else (*outer, after)
    if not _STACKS[ident]:
        del _STACKS[ident]


@contextmanager
def suspended() -> Iterator[None]:
    """No context applies to the backward passes of this thread inside the ``with`` block."""
    ident = threading.get_ident()
    stack = _STACKS.pop(ident, None)
    try:
        yield
    finally:
        if stack is not None:
            _STACKS[ident] = stack


def _is_foreign_thread() -> bool:
    """Whether this thread was not started by Python's ``threading``: one of autograd's own."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _is_alive(ident: int) -> bool:
    # A new thread, this one for example, may have got the number of one that has ended.
    this = threading.current_thread()
    return any(thread.ident == ident for thread in threading.enumerate() if thread is not this)


def is_disabled() -> bool:
    """Whether this thread is inside ``disable()``."""
    return getattr(_local, "disabled", 0) > 0


class backpack:
    """Activate extensions for the backward passes inside a ``with`` block.

    Example:
        >>> with backpack(DiagGGNExact(), BatchGrad()):
        ...     loss.backward()

    The block speaks for the thread that entered it. A nested block replaces the outer one until it
    ends. Several threads may each train a model of their own at the same time.
    """

    def __init__(
        self,
        *extensions: Extension,
        extension_hook: ExtensionHook | None = None,
        debug: bool = False,
        retain_graph: bool = False,
    ) -> None:
        """Check and store the request.

        Args:
            extensions: Extension instances to run.
            extension_hook: Called as ``extension_hook(module)`` for every module, after all
                extensions ran on it. Gradients of the module's own parameters are not accumulated
                yet at that time.
            debug: Log every step, and check at every module that samples do not mix.
            retain_graph: Keep inputs and outputs for another backward pass. Give it the same value
                as ``retain_graph`` of ``backward()``.

        Raises:
            NotAnExtensionError: One of the extensions is a class, or no extension at all.
            UsageError: Two extensions save under one name, or the hook cannot be called.
        """
        for extension in extensions:
            _check_extension(extension)
        fields = [extension.savefield for extension in extensions]
        twice = [name for name in fields if fields.count(name) > 1]
        if twice:
            raise UsageError(
                f"Two extensions would save under {twice[0]!r}: give one of them another savefield."
            )
        if extension_hook is not None and not callable(extension_hook):
            raise UsageError(f"extension_hook must be callable. Got {extension_hook!r}.")
        self._request = (extensions, extension_hook, debug, retain_graph)
        self._entered: list[Context] = []

    def __enter__(self) -> backpack:
        """Make this the active context of the thread.

        Raises:
            UsageError: The thread is inside ``disable()``.
        """
        if is_disabled():
            raise UsageError(
                "backpack(...) was entered inside disable(): nothing is recorded there, so no "
                "quantity could be computed. Leave the disable() block first."
            )
        from backpack_core.plugins import ensure_loaded

        ensure_loaded()
        extensions, hook, debug, retain_graph = self._request
        context = Context(extensions, hook, debug, retain_graph, _group(extensions))
        self._entered.append(context)
        ident = threading.get_ident()
        _STACKS[ident] = (*_STACKS.get(ident, ()), context)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous context; nothing of this one stays behind.

        Raises:
            NotExtendedError: Extensions were given, but no extended module took part in a backward
                pass of this block.
            BridgeError: A checkpoint could not give a saved tensor to us and to autograd.
        """
        context = self._entered.pop()
        ident = threading.get_ident()
        # By what they have seen: exchange() may have put another context in the place of ours.
        remaining = tuple(c for c in _STACKS.get(ident, ()) if c.seen is not context.seen)
        if remaining:
            _STACKS[ident] = remaining
        else:
            _STACKS.pop(ident, None)
        if isinstance(exc, CheckpointError) and context.extensions:
            raise BridgeError(
                "A quantity was carried through an operation inside checkpoint("
                "use_reentrant=False) that no module covers, and a checkpoint gives each saved "
                "tensor only once. Move the operation into a module and give it a layer rule, or "
                "leave the checkpoint out."
            ) from exc
        if exc_type is None and context.extensions and "ran" not in context.seen:
            names = ", ".join(type(e).__name__ for e in context.extensions)
            raise NotExtendedError(
                f"backpack({names}) computed nothing: no extended module took part in a backward "
                "pass of this block. Call extend(model) and extend(lossfunc) before the forward "
                "pass, run the forward pass outside of disable() and no_grad(), and call "
                "backward() inside the block, on the thread that entered it."
            )


class disable:
    """Record nothing in forward passes inside this ``with`` block (of this thread).

    For a plain gradient of an extended model without keeping inputs and outputs. It is not the
    opposite of :class:`backpack`, which speaks for the backward pass.
    """

    def __enter__(self) -> disable:
        """Stop recording."""
        _local.disabled = getattr(_local, "disabled", 0) + 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Record again, unless an outer block says otherwise."""
        _local.disabled -= 1


def _check_extension(extension: object) -> None:
    if isinstance(extension, Extension):
        return
    if isinstance(extension, type) and issubclass(extension, Extension):
        raise NotAnExtensionError(
            f"backpack(...) takes extension instances. Got the class {extension.__name__}: write "
            f"{extension.__name__}()."
        )
    raise NotAnExtensionError(
        f"backpack(...) takes extensions, instances of backpack_core.Extension. Got {extension!r} "
        f"of type {type(extension).__name__}."
    )


def _group(
    extensions: tuple[Extension, ...],
) -> tuple[tuple[Propagator, tuple[Extension, ...]], ...]:
    """Group extensions by equal propagators, except where one goes its own way at some modules.

    Within a group, those with a higher precedence come first.
    """
    from backpack_core.registry import registry

    groups: dict[object, tuple[Propagator, list[Extension]]] = {}
    for extension in extensions:
        alone = extension.module_extensions or registry.has_overrides(type(extension))
        key = (extension.propagator, id(extension) if alone else None)
        groups.setdefault(key, (extension.propagator, []))[1].append(extension)
    return tuple(
        (propagator, tuple(sorted(members, key=lambda extension: -extension.precedence)))
        for propagator, members in groups.values()
    )
