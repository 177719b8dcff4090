"""Errors for what no plugin provides: they name a broken plugin that may have."""

from __future__ import annotations

from backpack_core.discovery import Plugin
from backpack_core.errors import MissingPluginError, NotExtendedError
from backpack_core.plugins.loading import failures, load_error
from backpack_core.record.view import View


def missing(message: str, hint: str) -> MissingPluginError:
    """The error for a capability nobody provides, chained to the failed plugin that might have.

    Args:
        message: What was asked for.
        hint: The class that was asked for, or the module class that has no rule.
    """
    broken = failures()
    suspects = [p for p in broken if _may_provide(p, hint)] or broken
    if not suspects:
        return MissingPluginError(message)
    error = MissingPluginError(
        f"{message} A plugin that may provide it is broken. {load_error(suspects[0])}"
    )
    error.__cause__ = suspects[0].error
    return error


def _may_provide(plugin: Plugin, hint: str) -> bool:
    """Whether a plugin's name or class resembles the class that was asked for."""
    wanted = hint.lower()
    names = (plugin.name.replace("_", ""), plugin.attribute.removesuffix("Rule"))
    return any(name and (name.lower() in wanted or wanted in name.lower()) for name in names)


def nothing_arrived(view: View, name: str) -> Exception:
    """The error where a call is no part of an extended loss: a quantity would miss something.

    Args:
        view: The call.
        name: What needs the loss.
    """
    if view.output_shape == ():
        return missing(
            f"{name} starts at a loss, and no loss rule is known for {view.path}. Use a loss that "
            "an installed plugin knows (backpack-plugin-layers covers torch.nn), or write a "
            f"LossRule for {type(view.call.module).__name__}.",
            "loss",
        )
    return NotExtendedError(
        f"{name} needs a quantity that starts at the loss, but nothing arrived at {view.path} "
        f"(rule of {view.call.provenance}). Call lossfunc = extend(lossfunc) with a loss module of "
        "torch.nn, and compute the loss with it; a functional loss cannot be seen."
    )
