"""Errors of quantities that start at extended losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backpack_core import errors
from backpack_core._torch import class_of
from backpack_core.plugins.loading import missing
from backpack_core.record.view import View


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
        f"{view.call.provenance}). Call lossfunc = extend(lossfunc) with a loss module of torch.nn "
        "and compute the loss with it, since a functional loss cannot be seen; compute other "
        "derivatives (torch.autograd.grad, of an output) outside of the block."
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
