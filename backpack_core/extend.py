"""``extend`` and ``unextend``: installs the two hooks that record calls. Imports calls and engine.

The forward pre-hook notes the gradient edge of every input *before* the forward runs, so that
in-place activations cannot rewrite it. The forward hook makes the :class:`ModuleCall`, stores it in
the autograd node of the output, and puts one tensor hook on the output. Nothing is wrapped, no
full-backward hook is used, and the hooks are plain functions of this file, so that extended modules
can be copied and pickled.
"""

from __future__ import annotations

import inspect
import threading
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core.calls import (
    METADATA_KEY,
    PATH_ATTRIBUTE,
    Edge,
    Frame,
    ModuleCall,
    edge_of,
    iter_tensors,
    map_tensors,
    tensors_in,
)
from backpack_core.context import _local, logger
from backpack_core.errors import UsageError
from backpack_core.plugins import ensure_loaded
from backpack_core.registry import registry

M = TypeVar("M", bound=Module)

# Our place among a module's hooks. Torch counts from zero in every process, so that a key of its
# own could be given out again to a module that was pickled.
_KEY = -1


def extend(module: M, debug: bool = False, use_converter: bool = False) -> M:
    """Make a module, and all modules in it, report to active extensions.

    Containers get no hooks: a module is an operation if a layer rule names it, if it owns
    parameters, or if it has no children. Extending twice changes nothing.

    Args:
        module: A model, a layer, or a loss function.
        debug: Log what is extended.
        use_converter: Rewrite the model into modules with ``torch.fx`` first. Not needed for
            correctness: functional operations between modules are followed exactly. It gives
            second derivatives (``DiagHessian``) a module to look at where there was a function
            call. The converted model is a new module, and may order its parameters differently.

    Returns:
        The same object, unless it was converted.

    Raises:
        UsageError: The argument is no module.
    """
    given: object = module
    if not isinstance(given, Module):
        hint = f" Write {given.__name__}(...)." if isinstance(given, type) else ""
        raise UsageError(f"extend(...) takes an instance of torch.nn.Module. Got {given!r}.{hint}")
    ensure_loaded()
    if use_converter:
        from backpack_core.converter import convert

        module = cast(M, convert(module))
    _extend(module, "", debug)
    return module


def unextend(module: M) -> M:
    """Remove what :func:`extend` installed, from the module and all modules in it.

    Args:
        module: A module, extended or not.

    Returns:
        The same object.
    """
    for part in module.modules():
        part._forward_pre_hooks.pop(_KEY, None)
        part._forward_pre_hooks_with_kwargs.pop(_KEY, None)
        part._forward_hooks.pop(_KEY, None)
        part._forward_hooks_with_kwargs.pop(_KEY, None)
        part._forward_hooks_always_called.pop(_KEY, None)
        part.__dict__.pop(PATH_ATTRIBUTE, None)
    return module


def is_extended(module: Module) -> bool:
    """Whether this very module reports to extensions."""
    return _KEY in module._forward_hooks


def _extend(module: Module, path: str, debug: bool) -> None:
    resolved = registry.resolve(module)
    children = list(module.named_children())
    has_rule = not resolved.is_fallback
    if has_rule or module._parameters or not children:
        _install(module, path)
        if debug:
            logger.info("extend: %s '%s'", type(module).__name__, path)
    if has_rule and not resolved.rule.transparent:
        return
    for name, child in children:
        _extend(child, f"{path}.{name}" if path else name, debug)


def _install(module: Module, path: str) -> None:
    if is_extended(module):
        return
    module._forward_pre_hooks[_KEY] = _before_forward
    module._forward_pre_hooks_with_kwargs[_KEY] = True
    module._forward_hooks[_KEY] = _after_forward
    module._forward_hooks_with_kwargs[_KEY] = True
    module._forward_hooks_always_called[_KEY] = True
    if path:
        module.__dict__[PATH_ATTRIBUTE] = path


def _frames() -> list[Frame]:
    try:
        frames: list[Frame] = _local.frames
    except AttributeError:
        frames = _local.frames = []
    return frames


def _before_forward(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Open a frame: what only the moment before the forward can tell."""
    if getattr(_local, "disabled", 0) or not torch.is_grad_enabled():
        return
    hooks: Any = module._forward_hooks
    if _KEY not in hooks:  # some code clears the hooks of a module, and means ours
        return
    if next(iter(hooks)) != _KEY:
        # A hook of the user's that changes the output is an operation after the module.
        hooks.move_to_end(_KEY, last=False)
    frames = _frames()
    tensors = tensors_in(args, _ordered(module, kwargs) if kwargs else kwargs)
    frames.append(Frame(module, tensors, frames[-1] if frames else None))


def _after_forward(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    """Close the frame and record the call on every differentiable output."""
    if getattr(_local, "disabled", 0):
        return
    frames = _frames()
    depth = len(frames)
    while depth and frames[depth - 1].module is not module:
        depth -= 1
    if not depth:  # recording was off when it began
        return
    frame = frames[depth - 1]
    del frames[depth - 1 :]  # those above it ended in exceptions
    if not torch.is_grad_enabled():
        return
    outputs = (result,) if isinstance(result, Tensor) else tuple(iter_tensors(result))
    if any(o.grad_fn is not None for o in outputs):
        _record(module, args, kwargs, outputs, frame)


def _ordered(module: Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order in which ``forward`` declares them."""
    kind: Any = type(module)
    order = _parameter_names(kind)
    return dict(sorted(kwargs.items(), key=lambda item: order.get(item[0], len(order))))


@cache
def _parameter_names(kind: type[Module]) -> dict[str, int]:
    names = inspect.signature(kind.forward).parameters
    return {name: position for position, name in enumerate(names)}


def _record(
    module: Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: tuple[Tensor, ...],
    frame: Frame,
) -> None:
    nodes = [o.grad_fn for o in outputs if o.grad_fn is not None]
    before = {id(t): i for i, t in enumerate(frame.tensors)}
    inputs: list[Tensor] = []
    edges: list[Edge | None] = []
    versions: list[int] = []
    replaced: dict[int, Tensor] = {}
    is_rewired = False
    if kwargs:
        kwargs = _ordered(module, kwargs)
    for tensor in tensors_in(args, kwargs):
        slot = before.get(id(tensor))
        # A pre-hook of the user's that ran after ours may have replaced an argument.
        edge = edge_of(tensor) if slot is None else frame.edges[slot]
        version = tensor._version if slot is None else frame.versions[slot]
        stored = tensor
        if tensor.grad_fn is not None and any(tensor.grad_fn is n for n in nodes):
            # The module returned or rewrote its input: holding it would hold our own node.
            stored = replaced[id(tensor)] = tensor.detach()
            if slot is None:  # what it was before, nobody saw
                version, is_rewired = -1, True
            is_rewired |= tensor._is_view() and tensor._version != version
        if edge is not None and any(edge.node is n for n in nodes):
            edge = Edge(None, edge.output_nr, edge.depth)
        inputs.append(stored)
        edges.append(edge)
        versions.append(version)
    if replaced:
        args, kwargs = map_tensors((args, kwargs), lambda t: replaced.get(id(t), t))
    detached = tuple(o.detach() for o in outputs)
    call = ModuleCall(
        module,
        args,
        kwargs,
        tuple(inputs),
        tuple(edges),
        detached,
        frame,
        threading.get_ident(),
        frame.training,
        is_rewired,
    )
    call.is_readable = _saving_hooks() is None
    frame.close(edges)
    call._versions = (*versions, *(o._version for o in detached))
    for index, output in enumerate(outputs):
        node = output.grad_fn
        if node is not None:
            _attach(call, index, node, output)


def _saving_hooks() -> Any:
    """The hooks through which autograd saves tensors at present; true if torch does not tell."""
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False)
    except (AttributeError, TypeError):  # it is not public, and its arguments have changed before
        return True


def _attach(call: ModuleCall, index: int, node: Any, output: Tensor) -> None:
    from backpack_core.engine import OutputHook  # not at import of the core, which it would double

    table = node.metadata.setdefault(METADATA_KEY, {})
    records = table.get(output.output_nr)
    if records is None:
        records = table[output.output_nr] = []
        output.register_hook(OutputHook(records, output.output_nr))
    if all(other is not call for other, _ in records):
        records.append((call, index))
