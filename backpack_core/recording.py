"""The hooks that record calls in the forward pass.

The pre-hook notes the edge of every input *before* the forward runs, since an in-place activation
rewrites it. The forward hook makes the :class:`Call`, stores it in the autograd node of the output,
and puts one tensor hook on the output. Hooks on the output are enough, so no full-backward hook is
used: these make in-place modules fail. The hooks are globals of this file, so that extended modules
can be copied and pickled.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import _hooks, _torch
from backpack_core._hooks import hook_first
from backpack_core._torch import parametrizations_of
from backpack_core.engine.hooks import OutputHook
from backpack_core.errors import UsageError
from backpack_core.plugins.registry import FALLBACK, Resolved, registry
from backpack_core.record.call import NOTHING, SITES, Call, record_at_base, to_stored
from backpack_core.record.execution import (
    Execution,
    Received,
    aliases,
    is_recordable,
    new_base,
    simple_node,
)
from backpack_core.record.owner import OWNER_ATTRIBUTE, Owner, run_of_model
from backpack_core.record.state import (
    TRAITS_ATTRIBUTE,
    Traits,
    tensors_of,
    versions_and_frozen,
)
from backpack_core.record.storage import storage
from backpack_core.record.structure import in_order, iter_tensors, map_tensors, tensors_in
from backpack_core.record.switch import is_recording


class _Hook(partial[Any]):
    """A hook that says what to do when ``torch.jit.script`` wants to compile it.

    It is looked up by its name when it is copied or pickled, as a plain function is.
    """

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
        return self.func.__name__

    def __reduce__(self) -> str:
        """A global of this file."""
        return self.func.__name__


def before_forward(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward pre-hook: notes what only this moment can tell, in place of the keywords."""
    if not is_recording() or not _hooks.take_places(module):
        return None
    execution = Execution(kwargs, tensors_in(args, in_order(module, kwargs) if kwargs else kwargs))
    if _hooks.HOOKS_OF_ALL:
        execution.place = _hooks.PlaceOfAll(before_hooks_of_all)
    if module._modules and parametrizations_of(module):
        storage().begin(module, execution)
    return args, execution


@_Hook
def after_forward(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """The forward hook: records the call on every differentiable output."""
    if type(kwargs) is not Execution:
        if not is_recording():
            return None
        # A pre-hook of the user's, which had just been put behind ours, changed the keywords.
        kwargs = Execution(kwargs, ())
    if kwargs.is_recorded:
        return None
    if module._modules and parametrizations_of(module):
        storage().end(module, kwargs)
    if not torch.is_grad_enabled():
        return None
    replaced = _record(module, args, result, kwargs)
    kwargs.is_recorded = True
    kwargs.tensors, kwargs.edges, kwargs.place = (), (), None  # a hook of the user's may keep it
    return replaced


def before_hooks_of_all(
    module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """The same before hooks of all modules, which may change what this one returned."""
    return after_forward(module, args, kwargs, result) if type(kwargs) is Execution else None


def before_model(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The forward pre-hook of what was extended as a whole: notes where samples may lie."""
    owner = _owner_of_model(module)
    if owner is not None:
        if kwargs:
            kwargs = in_order(module, kwargs)
        owner.begin((*args, *kwargs.values()) if is_recording() else None)


@_Hook
def after_model(module: Module, args: Any, kwargs: Any, result: Any) -> None:
    """The forward hook of what was extended as a whole."""
    owner = _owner_of_model(module)
    if owner is not None:
        owner.end(iter_tensors(result))


def _owner_of_model(module: Module) -> Owner | None:
    owner = None if torch.compiler.is_compiling() else module.__dict__.get(OWNER_ATTRIBUTE)
    return owner if owner is not None and owner.module is module else None


def _record(module: Module, args: tuple[Any, ...], result: Any, execution: Execution) -> Any:
    """Make the call; returns what takes the place of the result, or ``None``."""
    traits = _traits(module)
    resolved = traits.resolved
    simple = simple_node(args, result, execution)
    if simple is not None:
        kept: Any = (args, {}, args, (result,))
        _attach(_call(module, traits, resolved, kept, execution, execution), 0, result, *simple)
        return None
    outputs = (result,) if isinstance(result, Tensor) else tuple(iter_tensors(result))
    live = [o for o in outputs if is_recordable(o)]
    if not live:
        if not resolved.is_fallback:
            # States, behind the first output, may have samples elsewhere.
            run_of_model(module, get_ident()).pass_on(tensors_in(args, {}), outputs[:1])
        return None
    own = aliases(live, execution)
    if True in [t.is_complex() for t in (*outputs, *execution.tensors)]:
        resolved = FALLBACK  # rules are formulas for real numbers
    kwargs = in_order(module, execution) if execution else {}
    received = Received(execution, outputs, own.values())
    inputs = tuple([received.store(t) for t in tensors_in(args, kwargs)])
    # A list may get more entries later: what is made of the output, and then holds it.
    if received.replaced or any(isinstance(a, (list, dict)) for a in (*args, *kwargs.values())):
        args, kwargs = map_tensors((args, kwargs), lambda t: received.replaced.get(id(t), t))
    kept = args, kwargs, inputs, outputs
    call = _call(module, traits, resolved, kept, received, execution)
    for index, output in enumerate(outputs):
        if is_recordable(output):
            shown = own.get(id(output), output)
            assert shown.grad_fn is not None
            base = new_base(shown, execution.tensors) if shown._is_view() else None
            _attach(call, index, shown, shown.grad_fn, base)
    return map_tensors(result, lambda t: own.get(id(t), t)) if own else None


def _traits(module: Module) -> Traits:
    """The rule that speaks for a module, and its settings."""
    attributes = module.__dict__
    traits: Traits | None = attributes.get(TRAITS_ATTRIBUTE)
    if traits is None or traits.generation != registry.generation or not traits.hold(module):
        attributes[TRAITS_ATTRIBUTE] = None  # it is one of the attributes
        generation = registry.generation  # before: another thread may change it meanwhile
        traits = Traits(module, registry.resolve(module), generation)
        attributes[TRAITS_ATTRIBUTE] = traits
    return traits


def _call(
    module: Module, traits: Traits, resolved: Resolved, kept: Any, what: Any, of: Execution
) -> Call:
    """A call of which everything is noted that may be another thing later.

    Args:
        module: The module.
        traits: What is the same at all of its calls.
        resolved: Its rule, at this one.
        kept: Its arguments, the tensors among them, and what it returned.
        what: What is known of what it received: all of it before the forward, or more.
        of: What was known before the forward.
    """
    args, kwargs, inputs, outputs = kept
    parameters: int | tuple[str, ...]
    if traits.is_whole and not module._modules:
        (owned, parameters), computed = tensors_of(module), NOTHING
    else:
        owned, parameters, computed = _tensors(module, resolved, of)
    detached = tuple(map(Tensor.detach, outputs))
    counts, frozen = versions_and_frozen(detached, owned)
    before = what.versions
    noted: Any
    noted = args, kwargs, inputs, detached, before, counts, owned, parameters, computed, frozen
    thread, is_readable = get_ident(), _torch.saving_hooks() is None
    run, unpacks_twice = run_of_model(module, thread), is_readable
    if not is_readable:
        noted, run, unpacks_twice = storage().keep(to_stored(noted), run)
    return Call(
        module,
        resolved.rule,
        resolved.provenance,
        what.edges,
        noted,
        thread,
        module.training,
        traits.settings,
        run,
        what.is_rewired,
        is_readable,
        unpacks_twice,
    )


def _attach(call: Call, index: int, output: Tensor, node: Any, base: Tensor | None) -> None:
    # An output has one call at most.
    node.metadata.setdefault(SITES, {})[output.output_nr] = call, index
    hook = OutputHook(call, index, output.output_nr)
    hook.hooks = weakref.ref(hook_first(output, node, hook))
    if base is not None:
        record_at_base(call, index, output, base)


def _tensors(
    module: Module, resolved: Resolved, execution: Execution
) -> tuple[dict[str, Tensor | None], int | tuple[str, ...], Mapping[str, tuple[Tensor, ...]]]:
    """Tensors of a module; which are parameters, or how many of the first; what some come from."""
    if resolved.is_fallback:
        inside = parametrizations_of(module) and [n for n, _ in module.named_parameters()]
        more = tuple(n for n in inside if n.startswith("parametrizations."))
        return *tensors_of(module, more), NOTHING
    owned, count = tensors_of(module, _nested(resolved.params))
    found = storage().computed(module, resolved.params, execution)
    computed = {name: leaves for name, (_, leaves) in found.items()}
    behind = {id(leaf) for leaves in computed.values() for leaf in leaves}
    names = tuple(owned)[:count]
    owned.update((name, tensor) for name, (tensor, _) in found.items())
    remaining = [n for n in names if id(owned[n]) not in behind]
    return owned, (*remaining, *computed), computed


@cache
def _nested(names: tuple[str, ...]) -> tuple[str, ...]:
    """Which parameters belong to modules inside."""
    return tuple(name for name in names if "." in name)
