"""The function that users call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from backpack_capture.compilers import compiler_of
from backpack_capture.engine import Asked
from backpack_capture.step import CapturedStep
from backpack_core.errors import UsageError


def capture(
    step: Callable[..., Any],
    *parts: Any,
    compile: str | None = None,
    gradient: Any = "autograd",
    check: Any = "first",
    extension_hook: Callable[[Module], None] | None = None,
    hook_only_computes: bool = False,
    **more: Any,
) -> CapturedStep:
    """Make a training step that is recorded once it is trusted, and replayed without the engine.

    Example:
        >>> step = capture(lambda X, y: lossfunc(model(X), y), model, lossfunc, BatchGrad())
        >>> loss = step(X, y)

    Args:
        step: A function that returns the loss, or a tuple with the loss in front.
        parts: The extended modules that it calls, and extensions.
        compile: ``"inductor"`` has the recorded graph compiled by torch's compiler, in a process
            beside; it runs as it was recorded until that is done. ``"cudagraphs"`` makes one
            launch of it, on a CUDA device.
        gradient: As of :class:`~backpack_core.backpack`.
        check: As there. ``"always"`` is never recorded.
        extension_hook: As there. It is recorded with the step.
        hook_only_computes: Says that it does nothing else than compute: it reads results, sets and
            deletes attributes of parameters, and keeps or prints nothing. Needed with it.
        more: Nothing else of what :class:`~backpack_core.backpack` takes.

    Returns:
        A step: called as the function, it runs the forward pass, the loss, and the backward pass
        with the extensions, and stores ``.grad`` and results on parameters as these do.

    Raises:
        UsageError: An argument is nothing that can be captured.
    """
    if more:
        raise UsageError(
            f"capture() does not take {next(iter(more))}=: what is called during a pass is not "
            "part of a graph. Write the step with backpack(...) and loss.backward()."
        )
    if not hasattr(step, "__qualname__") or isinstance(step, type):
        raise UsageError(f"capture() takes a function that returns the loss. Got {step!r}.")
    modules = [part for part in parts if isinstance(part, Module)]
    if not modules:
        raise UsageError("capture() needs the extended modules that the step calls.")
    extensions = tuple([part for part in parts if not isinstance(part, Module)])
    if extension_hook is not None and not hook_only_computes:
        raise UsageError(
            "A graph holds what extension_hook computes, and nothing else that it does. If it only "
            "reads results and sets attributes of parameters, say so: capture(..., "
            "extension_hook=..., hook_only_computes=True). Otherwise, write the step with "
            "backpack(...) and loss.backward()."
        )
    asked = Asked(extensions, gradient, check, extension_hook)
    asked.block()  # which refuses what is wrong with them
    return CapturedStep(step, modules, asked, compiler_of(compile))
