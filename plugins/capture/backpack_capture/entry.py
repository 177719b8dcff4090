"""The function that users call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, overload

from torch.nn import Module

from backpack_capture.compiled import Compiler
from backpack_capture.compilers import compiler_of
from backpack_capture.engine import Asked, Observer
from backpack_capture.hosted import Host, HostedStep
from backpack_capture.step import CapturedStep
from backpack_core import Extension
from backpack_core.errors import UsageError


@overload
def capture(
    step: Callable[..., Any], *parts: Module | Extension, **options: Any
) -> CapturedStep: ...
@overload
def capture(step: Callable[..., Any], *parts: Module | Host, **options: Any) -> HostedStep: ...
def capture(
    step: Callable[..., Any],
    *parts: Any,
    compile: str | None = None,
    gradient: Any = "autograd",
    check: Any = "first",
    extension_hook: Callable[[Module], None] | None = None,
    hook_only_computes: bool = False,
    observer: Callable[[], Observer] | None = None,
    **more: Any,
) -> CapturedStep | HostedStep:
    """Make a training step that is recorded once it is trusted, then replayed without the engine.

    Example:
        >>> step = capture(lambda X, y: lossfunc(model(X), y), model, lossfunc, BatchGrad())
        >>> loss = step(X, y)

    Args:
        step: A function that returns the loss, or a tuple that begins with the loss.
        parts: The extended modules that it calls, and extensions. Instead of extensions, one object
            that opens its own block around passes: an optimizer of ``backpack-optimizers``, a
            private training, ``combined(...)``. Then the step runs in that block.
        compile: With ``"inductor"``, torch's compiler compiles the recorded graph in a separate
            process; until that is done, the graph runs as recorded. ``"cudagraphs"`` makes the
            graph a single launch on a CUDA device.
        gradient: As for :class:`~backpack_core.backpack`.
        check: As there. With ``"always"``, steps are never recorded.
        extension_hook: As there. It is recorded with the step.
        hook_only_computes: Says that the hook only computes: it reads results, sets and deletes
            attributes of parameters, and keeps or prints nothing. Required with a hook.
        observer: A function that makes an observer for each pass. The observer is called with the
            view of every visited output. Its method ``found()`` returns tensors and numbers, in
            lists, tuples and dictionaries, which are computed with the step. The step then returns
            a pair: what the function returned, and the value of ``found()``.
        more: Other arguments of :class:`~backpack_core.backpack` are refused.

    Returns:
        A step. Call it like the function: it runs the forward pass, the loss, and the backward pass
        with the extensions, and stores ``.grad`` and results on parameters as these do.

    Raises:
        UsageError: An argument cannot be captured.
    """
    if more:
        raise UsageError(
            f"capture() does not take {next(iter(more))}=: a captured step takes gradient=, "
            "check=, extension_hook= and observer=. Write the step with backpack(...) and "
            "loss.backward()."
        )
    if not callable(step) or isinstance(step, (type, Module)):
        raise UsageError(
            f"capture() takes a function that returns the loss. Got {step!r:.80}: write "
            "capture(lambda X, y: lossfunc(model(X), y), model, lossfunc, ...)."
        )
    if not hasattr(step, "__qualname__"):  # a functools.partial, or an object
        step = _function(step)
    if extension_hook is not None and not hook_only_computes:
        raise UsageError(
            "A graph repeats only what extension_hook computes, not what else it does. If it only "
            "reads results and sets attributes of parameters, say so: capture(..., "
            "extension_hook=..., hook_only_computes=True). Otherwise, write the step with "
            "backpack(...) and loss.backward()."
        )
    make = partial(_made, compiler_of(compile))
    host = next((part for part in parts if isinstance(part, Host)), None)
    if host is None:
        return make(
            *(step, *parts),
            gradient=gradient,
            check=check,
            extension_hook=extension_hook,
            observer=observer,
        )
    modules = [part for part in parts if isinstance(part, Module)]
    is_told = (gradient, check, extension_hook, observer) != ("autograd", "first", None, None)
    if is_told or len(modules) < len(parts) - 1:
        raise UsageError(
            f"{type(host).__name__} decides what its passes compute, so capture(...) takes only "
            "the function, modules, this object, and compile=. To compute anything else, write a "
            "separate step."
        )
    return HostedStep(
        step, host, lambda function, *more, **said: make(function, *modules, *more, **said)
    )


def _function(called: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls an object; the guard looks at the object behind it."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    step.__qualname__ = type(called).__qualname__
    return step


def _made(
    compiler: Compiler | None,
    function: Callable[..., Any],
    *parts: Any,
    gradient: Any = "autograd",
    check: Any = "first",
    extension_hook: Callable[[Module], None] | None = None,
    observer: Callable[[], Observer] | None = None,
) -> CapturedStep:
    """A captured step of modules and extensions."""
    modules = [part for part in parts if isinstance(part, Module)]
    if not modules:
        raise UsageError("capture() needs the extended modules that the step calls.")
    made = None if observer is None else observer()
    if made is not None and not (callable(made) and hasattr(made, "found")):
        raise UsageError(
            "observer= makes an object for each pass. It is called with the view of every visited "
            "output, and has a method found(): pass its class, or a function that returns one. "
            f"This one made {made!r:.80}."
        )
    extensions = tuple([part for part in parts if not isinstance(part, Module)])
    asked = Asked(extensions, gradient, check, extension_hook, observer)
    asked.block()  # refuses wrong arguments
    return CapturedStep(function, modules, asked, compiler)
