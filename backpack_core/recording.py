"""``extend`` and ``unextend``: the two hooks that record calls.

The forward pre-hook notes the edge of every input *before* the forward runs, so that in-place
activations cannot rewrite it. The forward hook makes the :class:`Call`, stores it in the autograd
node of the output, and puts one tensor hook on the output. No full-backward hook is used, and the
hooks are globals of this file, so that extended modules can be copied and pickled.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import _torch
from backpack_core._torch import ModuleHooks, version_of
from backpack_core.engine.active import logger
from backpack_core.engine.backward import OutputHook
from backpack_core.errors import UsageError
from backpack_core.plugins.loading import ensure_loaded
from backpack_core.plugins.registry import FALLBACK, Resolved, registry
from backpack_core.record.call import (
    PATH_ATTRIBUTE,
    Call,
    Edge,
    Layout,
    Stored,
    attach,
    attach_viewed,
    edge_of,
    has_site,
)
from backpack_core.record.owner import OWNER_ATTRIBUTE, Owner
from backpack_core.record.structure import iter_tensors, map_tensors, tensors_in
from backpack_core.record.switch import is_disabled, is_recording

M = TypeVar("M", bound=Module)


def extend(module: M, debug: bool = False) -> M:
    """Make a module, and all modules in it, report to active extensions.

    Containers get no hooks: a module is an operation if a layer rule names it, if it owns
    parameters, or if it has no children. Extending twice changes nothing.

    Args:
        module: A model, a layer, or a loss function.
        debug: Log what is extended.

    Returns:
        The same object.

    Raises:
        UsageError: The argument is no module.
    """
    given: object = module
    if not isinstance(given, Module):
        hint = f" Write {given.__name__}(...)." if isinstance(given, type) else ""
        raise UsageError(f"extend(...) takes an instance of torch.nn.Module. Got {given!r}.{hint}")
    ensure_loaded()
    _extend(module, "", Owner(module), debug)
    return module


def unextend(module: M) -> M:
    """Remove what :func:`extend` installed, from the module and all modules in it.

    Args:
        module: A module, extended or not.

    Returns:
        The same object.
    """
    for part in module.modules():
        ModuleHooks.remove(part)
        part.__dict__.pop(PATH_ATTRIBUTE, None)
        part.__dict__.pop(OWNER_ATTRIBUTE, None)
    return module


def is_extended(module: Module) -> bool:
    """Whether this very module reports to extensions."""
    return ModuleHooks.are_installed(module)


def _extend(module: Module, path: str, owner: Owner, debug: bool) -> None:
    resolved = registry.resolve(module)
    children = list(module.named_children())
    has_rule = not resolved.is_fallback
    if has_rule or module._parameters or not children:
        if not is_extended(module):
            ModuleHooks.install(module, before_forward, after_forward)
            if path:
                module.__dict__[PATH_ATTRIBUTE] = path
        module.__dict__[OWNER_ATTRIBUTE] = owner
        if debug:
            logger.info("extend: %s '%s'", type(module).__name__, path)
    if has_rule and not resolved.rule.transparent:
        return
    for name, child in children:
        _extend(child, f"{path}.{name}" if path else name, owner, debug)


class _Hook:
    """A hook that says what to do when ``torch.jit.script`` wants to compile it.

    It is looked up by its name when it is copied or pickled, as a plain function is.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any) -> Any:
        """Run the hook."""
        return self._function(*args)

    @property
    def __name__(self) -> str:
        """The name, by which ``torch.jit.script`` asks for the source.

        Raises:
            UsageError: It does.
        """
        if _torch.is_scripting():
            raise UsageError(
                "torch.jit.script compiles every hook of a module, and those of extend() are no "
                "code it knows: call unextend(model) first, or script a copy of the model."
            )
        return self._function.__name__

    def __reduce__(self) -> str:
        """A global of this file."""
        return self._function.__name__


class Execution:
    """A module execution that has begun: what only the moment before the forward can tell."""

    __slots__ = ("edges", "is_recorded", "tensors", "thread", "training", "versions")

    def __init__(self, training: bool, tensors: tuple[Tensor, ...]) -> None:
        self.training = training
        self.tensors = tensors
        self.versions = [version_of(t) for t in tensors]
        self.edges = [edge_of(t) for t in tensors]
        self.thread = threading.get_ident()
        self.is_recorded = False

    def __deepcopy__(self, memo: Any) -> None:
        """One that never ended: an exception that hooks do not hear of came in between."""

    def __reduce__(self) -> tuple[Any, ...]:
        """The same for pickle."""
        return type(None), ()


# Where executions of a module are noted, on the module: what does not end must not outlive it.
_EXECUTIONS = "_backpack_executions"


def before_forward(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The forward pre-hook: notes what only this moment can tell."""
    if not is_recording() or not ModuleHooks.come_first(module):
        return
    tensors = tensors_in(args, _ordered(module, kwargs) if kwargs else kwargs)
    execution = Execution(module.training, tensors)
    known = module.__dict__.get(_EXECUTIONS)
    if known is None:
        module.__dict__[_EXECUTIONS] = [execution]
    else:
        _forget_interrupted(module, known)
        known.append(execution)
    ModuleHooks.precede_hooks_of_all(before_hooks_of_all)


@_Hook
def after_forward(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """The forward hook: records the call on every differentiable output."""
    execution = _running(module)
    if execution is None:
        return None
    executions: list[Execution] = module.__dict__[_EXECUTIONS]
    executions.remove(execution)
    if not executions:
        del module.__dict__[_EXECUTIONS]
    return None if execution.is_recorded else _record(module, args, kwargs, result, execution)


def before_hooks_of_all(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """The same before hooks of all modules, which may change what this one returned."""
    execution = _running(module)
    if execution is None:
        return None
    execution.is_recorded = True
    return _record(module, args, kwargs, result, execution)


def _running(module: Module) -> Execution | None:
    """The innermost execution of this thread; ``None`` if recording was off when it began."""
    known: list[Execution] | None = module.__dict__.get(_EXECUTIONS)
    if known is None:
        return None
    thread = threading.get_ident()
    return next((execution for execution in reversed(known) if execution.thread == thread), None)


def _forget_interrupted(module: Module, known: list[Execution]) -> None:
    """Drop executions that an exception ended which no hook hears of, as KeyboardInterrupt."""
    thread, running = threading.get_ident(), _torch.running_calls(module) - 1
    mine = [e for e in known if e.thread == thread]
    for stale in mine[running:]:
        known.remove(stale)


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
    result: Any,
    execution: Execution,
) -> Any:
    """Make the call; returns what takes the place of the result, or ``None``."""
    if is_disabled() or not torch.is_grad_enabled():
        return None
    outputs = (result,) if isinstance(result, Tensor) else tuple(iter_tensors(result))
    if not any(o.grad_fn is not None and o.layout is torch.strided for o in outputs):
        return None
    aliases = _aliases(outputs, execution)
    resolved = registry.resolve(module)
    if any(t.is_complex() for t in (*outputs, *execution.tensors)):
        resolved = FALLBACK  # rules are formulas for real numbers
    if kwargs:
        kwargs = _ordered(module, kwargs)
    inputs = _Inputs(execution, outputs)
    stored_inputs = tuple(map(inputs.store, tensors_in(args, kwargs)))
    if inputs.replaced:
        args, kwargs = map_tensors((args, kwargs), lambda t: inputs.replaced.get(id(t), t))
    detached = tuple(o.detach() for o in outputs)
    owned, parameters = _owned(module, resolved)
    versions = (*inputs.versions, *(version_of(o) for o in detached))
    stored = Stored(args, kwargs, stored_inputs, detached, versions, owned, parameters)
    call = Call(
        module,
        resolved.rule,
        resolved.provenance,
        tuple(inputs.edges),
        stored,
        threading.get_ident(),
        execution.training,
        _settings(module),
        inputs.is_rewired,
        not _torch.has_saving_hooks(),
    )
    for index, output in enumerate(outputs):
        _attach(call, index, aliases.get(id(output), output), execution)
    return map_tensors(result, lambda t: aliases.get(id(t), t)) if aliases else None


class _Inputs:
    """What a call received, as it is stored."""

    def __init__(self, execution: Execution, outputs: tuple[Tensor, ...]) -> None:
        self._execution = execution
        self._slots = {id(t): i for i, t in enumerate(execution.tensors)}
        self._nodes = [o.grad_fn for o in outputs if o.grad_fn is not None]
        self.edges: list[Edge | None] = []
        self.versions: list[int] = []
        self.replaced: dict[int, Tensor] = {}
        self.is_rewired = False

    def store(self, tensor: Tensor) -> Tensor:
        """The tensor, or what takes its place: holding our own node would be a cycle."""
        slot = self._slots.get(id(tensor))
        # A pre-hook of the user's that ran after ours may have replaced an argument.
        edge = edge_of(tensor) if slot is None else self._execution.edges[slot]
        version = version_of(tensor) if slot is None else self._execution.versions[slot]
        if tensor.grad_fn is not None and self._is_own(tensor.grad_fn) and edge_of(tensor) != edge:
            # The module rewrote its input. Where it came from before, a pre-hook saw.
            self.is_rewired |= _torch.base_of(tensor) is not None and version_of(tensor) != version
            tensor = self._replace(tensor)
        elif slot is None and edge is not None and self._is_own(edge.node):
            # It was replaced and rewritten: what it was before, nobody saw.
            version, self.is_rewired = -1, True
            tensor, edge = self._replace(tensor), None
        self.edges.append(edge)
        self.versions.append(version)
        return tensor

    def _replace(self, tensor: Tensor) -> Tensor:
        detached = self.replaced[id(tensor)] = tensor.detach()
        return detached

    def _is_own(self, node: Any) -> bool:
        return any(node is own for own in self._nodes)


def _aliases(outputs: tuple[Tensor, ...], execution: Execution) -> dict[int, Tensor]:
    """Outputs with a node of their own, for those that share one with something else.

    A module may return its input, or what a module inside returned; and of several outputs one may
    depend on another. Each output is looked at by itself, with a gradient of its own.
    """
    live = [o for o in outputs if o.grad_fn is not None and o.layout is torch.strided]
    received = {(e.node, e.output_nr) for e in execution.edges if e is not None}
    found: dict[int, Tensor] = {}
    for output in live:
        place: Any = (output.grad_fn, output.output_nr)
        if len(live) > 1 or place in received or has_site(*place):
            found[id(output)] = output.view_as(output)
    return found


def _attach(call: Call, index: int, output: Tensor, execution: Execution) -> None:
    node = output.grad_fn
    if node is None or output.layout is not torch.strided:
        return
    attach(call, index, node, output.output_nr)
    hook = OutputHook(call, index, output.output_nr)
    hook.hooks = weakref.ref(_torch.hook_first(output, node, hook))
    base = _torch.base_of(output)
    if base is None or base.grad_fn is None:
        return
    if any(base is t or base is _torch.base_of(t) for t in execution.tensors):
        return  # a view of what it received: whoever made that is recorded there
    layout = Layout(
        output.shape,
        output.stride(),
        output.storage_offset() - base.storage_offset(),
        base.shape,
        base.stride(),
    )
    attach_viewed(call, index, Edge(base.grad_fn, base.output_nr), layout)


def _owned(
    module: Module, resolved: Resolved
) -> tuple[dict[str, tuple[Tensor, int]], tuple[str, ...]]:
    """Parameters and buffers of a module, as this forward pass used them."""
    owned = {n: (t, version_of(t)) for n, t in module._parameters.items() if t is not None}
    for name in resolved.nested:
        tensor = _nested(module, name)
        if tensor is not None:
            owned[name] = (tensor, version_of(tensor))
    parameters = tuple(owned)
    for name, tensor in module._buffers.items():
        if tensor is not None:
            owned[name] = (tensor, version_of(tensor))
    return owned, parameters


def _nested(module: Module, name: str) -> Tensor | None:
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


_PLAIN = (int, float, bool, str, type(None), tuple, torch.dtype)
_OF_ALL = frozenset(vars(Module()))
_setting_names: dict[type[Module], tuple[int, tuple[str, ...]]] = {}


def _settings(module: Module) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and values of a module's plain attributes."""
    attributes = module.__dict__
    known = _setting_names.get(type(module))
    if known is None or known[0] != len(attributes):
        names = [n for n, v in attributes.items() if n not in _OF_ALL and isinstance(v, _PLAIN)]
        known = _setting_names[type(module)] = (len(attributes), tuple(names))
    names = known[1]
    try:
        return names, tuple([attributes[name] for name in names])
    except KeyError:  # another instance of the class has other attributes
        del _setting_names[type(module)]
        return _settings(module)
