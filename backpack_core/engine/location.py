"""Errors of a pass: where they happened, and what is wrong with losses and hooks.

An error gets the names of module, extension, and the plugins that provided them. An exception of
any other type that a plugin's code raises becomes a ``PluginCodeError`` here.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from backpack_core import errors
from backpack_core._torch import Node, class_of
from backpack_core.contract.extension import Extension
from backpack_core.graph import Survey
from backpack_core.plugins.loading import missing
from backpack_core.plugins.registry import registry
from backpack_core.record.view import View


def place(error: Exception, view: View, extension: Extension | None) -> None:
    """Add the call where an error happened."""
    rule = f"{type(view.call.rule).__name__} of {view.call.provenance}"
    _place(error, extension, f", at {view.path}, rule {rule}")


def place_between(
    error: Exception, survey: Survey, extension: Extension | None, node: Node | None = None
) -> None:
    """Add the modules whose outputs an operation between calls works on, if they are known.

    Args:
        error: The error.
        survey: What is known about the graph.
        extension: The extension.
        node: The operation; by default the one that the error names.
    """
    at = error.node if node is None and isinstance(error, errors.BridgeError) else node
    paths = [] if at is None else survey.sources(at)
    _place(error, extension, f", after {', '.join(paths)}" if paths else "")


def _place(error: Exception, extension: Extension | None, where: str) -> None:
    """Add a place, unless a function further inside has added one."""
    if getattr(error, "backpack_context", ""):
        return
    who = "no extension" if extension is None else registry.describe(extension)
    text = f"[{who}{where}]"
    line = "" if isinstance(error, _AS_THEY_ARE) else _foreign_line(error)
    if line:
        raised = "".join(traceback.format_exception_only(error)).strip()
        is_missing = isinstance(error, NotImplementedError)
        kind = errors.UnsupportedByPluginError if is_missing else errors.PluginCodeError
        fault = kind(f"{raised}\nraised in {line}\n{text}")
        fault.backpack_context = text
        raise fault from error
    if isinstance(error, errors.BackpackError):
        error.args = (f"{error.args[0] if error.args else ''}\n{text}", *error.args[1:])
    elif hasattr(error, "add_note"):
        error.add_note(text)
    error.backpack_context = text  # type: ignore[attr-defined]


# Not wrapped: our errors, which say what to do; lack of memory; warnings made into errors.
_AS_THEY_ARE = (errors.BackpackError, Warning, torch.OutOfMemoryError, MemoryError)
_OURS = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def _foreign_line(error: Exception) -> str:
    """The innermost line that is neither core's nor torch's; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_OURS, "<")):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return ""


def nothing_arrived(view: View, name: str) -> Exception:
    """The error for a call that no quantity has reached, since no extended loss is behind it.

    Args:
        view: The call.
        name: The extension that needs the quantity.
    """
    kind = class_of(view.call.module)
    if view.output_shape == ():
        return missing(
            f"{name} starts at a loss, and no loss rule is known for {view.path}.",
            kind,
            f" Use a loss that an installed plugin knows, or write a LossRule for {kind.__name__}.",
        )
    return errors.NotExtendedError(
        f"{name} starts at an extended loss, and there is none behind {view.path} (rule of "
        f"{view.call.provenance}), or a rule behind it returned None for an input. Call lossfunc = "
        "extend(lossfunc) with a loss module of torch.nn and compute the loss with it, since a "
        "functional loss cannot be seen; compute other derivatives (torch.autograd.grad, of an "
        "output) outside of the block."
    )


def changed_gradient(view: View, changed_by: Sequence[Any]) -> errors.UnsupportedError:
    """The error for a gradient that hooks have changed: curvature would not see the change.

    Args:
        view: The call whose output has the hooks.
        changed_by: The hooks on the tensor; empty if they are on its autograd node.
    """
    names = [getattr(hook, "__qualname__", repr(hook)) for hook in changed_by]
    where = f"that tensor ({', '.join(names)})" if names else "its autograd node"
    return errors.UnsupportedError(
        f"The gradient of the output of {view.path} is changed by a hook on {where}, so the "
        "curvature of the loss is not that of the function that backward() differentiates. Remove "
        "the hook, or leave second-order extensions out."
    )
