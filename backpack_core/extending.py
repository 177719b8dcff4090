"""``extend`` and ``unextend``: install the hooks that record forward passes.

Only modules that count as one operation get them; see :func:`extend`.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isroutine
from reprlib import repr as abridged
from typing import TypeVar

from torch.nn import Module, ParameterDict, ParameterList

import backpack_core.recording as recording
from backpack_core import _hooks
from backpack_core._hooks import MODEL_KEY
from backpack_core._torch import parametrizations_of
from backpack_core.engine.active import logger
from backpack_core.engine.between import between
from backpack_core.errors import UsageError
from backpack_core.plugins.loading import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_core.record.models import OWNER_ATTRIBUTE, PATH_ATTRIBUTE, Owner
from backpack_core.record.state import OUR_ATTRIBUTES, TRAITS_ATTRIBUTE
from backpack_core.record.storage import storage

M = TypeVar("M", bound=Module)


def extend(module: M, *, debug: bool = False, batch_axis: int | Mapping[str, int] = 0) -> M:
    """Make a module, and all modules in it, report to active extensions.

    Containers get no hooks: a module is an operation if a layer rule names it, if it owns
    parameters, or if it has no children. Extending twice changes nothing.

    Args:
        module: A model, a layer, or a loss function.
        debug: Log what is extended.
        batch_axis: Where the samples lie in what the model receives, if not on axis 0, as in
            sequences ``[T, N, D]``. A mapping gives the axis by the path of a module, ``""`` for
            the model. Modules inside a named one have the same axis, unless they are named, too.
            Only needed if lengths do not show it: with one sample or one step, with as many steps
            as samples, or if the loss has a row for each step of each sample. A loss of one row for
            each sample needs them on axis 0 in any case.

    Returns:
        The same object.

    Raises:
        UsageError: The argument is not a module, or ``batch_axis`` names no axis or no part of it.
    """
    given: object = module
    if not isinstance(given, Module):
        hint = f" Write {given.__name__}(...)." if isinstance(given, type) else ""
        if isroutine(given):
            hint = " A function cannot be extended: for a loss, use its module of torch.nn."
        shown = " ".join(abridged(given).split())
        raise UsageError(f"extend(...) takes an instance of torch.nn.Module. Got {shown}.{hint}")
    ensure_loaded()
    is_first = type(batch_axis) is int and not batch_axis
    owner = Owner(module, {} if is_first else between().axes_of(module, batch_axis))
    before = module.__dict__.get(OWNER_ATTRIBUTE)
    if before is not None and before.axes != owner.axes:
        between().forget(module)
    module.__dict__[OWNER_ATTRIBUTE] = owner
    if not registry.resolve(module).rule.is_loss:  # a loss receives no input of the model
        _hooks.install(module, recording.before_model, recording.after_model, MODEL_KEY)
    _extend(module, "", owner, debug)
    return module


def unextend(module: M) -> M:
    """Remove what :func:`extend` installed, from the module and all modules in it.

    Args:
        module: A module, extended or not.

    Returns:
        The same object.
    """
    for part in module.modules():
        _hooks.remove(part)
        between().forget(part)
        for name in OUR_ATTRIBUTES:
            part.__dict__.pop(name, None)
    return module


def is_extended(module: Module) -> bool:
    """Whether a module reports to extensions; for a container, whether all of its parts do.

    False if a part was added, replaced or wrapped since: call :func:`extend` again.
    """
    is_operation, children = _parts(module)
    is_missing = is_operation and not _hooks.are_installed(module)
    return not is_missing and all(is_extended(child) for _, child in children)


def _parts(module: Module) -> tuple[bool, list[tuple[str, Module]]]:
    """Whether a module counts as one operation, and which modules in it get hooks of their own."""
    resolved = registry.resolve(module)
    children, computing = list(module.named_children()), parametrizations_of(module)
    has_rule = not resolved.is_fallback
    # Nobody calls a list of parameters, so what it holds is the module's own.
    holders = [module, *(c for _, c in children if isinstance(c, ParameterList | ParameterDict))]
    has_own = any(holder._parameters for holder in holders)
    is_operation = bool(has_rule or has_own or computing or not children)
    if not resolved.rule.transparent:
        return is_operation, []
    if computing:
        children = [(name, child) for name, child in children if name != "parametrizations"]
    return is_operation, children


def _extend(module: Module, path: str, owner: Owner, debug: bool) -> None:
    is_operation, children = _parts(module)
    if is_operation:
        if not _hooks.are_installed(module):
            _hooks.install(module, recording.before_forward, recording.after_forward)
        if not path or module.__dict__.get(OWNER_ATTRIBUTE) is not owner:
            module.__dict__.update({OWNER_ATTRIBUTE: owner, PATH_ATTRIBUTE: path})
        module.__dict__.setdefault(TRAITS_ATTRIBUTE)
        if debug:
            logger.info("extend: %s '%s'", type(module).__name__, path)
    if parametrizations_of(module):
        storage().extend(module)
    for name, child in children:
        _extend(child, f"{path}.{name}" if path else name, owner, debug)
