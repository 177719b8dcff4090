"""The hooks that record calls in the forward pass.

The pre-hook notes the edge of every input *before* the forward, since an in-place activation
rewrites it. The forward hook makes the :class:`Call`, stores it in the autograd node of the output,
and puts a tensor hook on the output. Full-backward hooks are not used, because they make in-place
modules fail. The hooks are globals of this module, so that extended models can be copied and
pickled.
"""

from __future__ import annotations

import weakref
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from backpack_core import _hooks, _torch
from backpack_core._hooks import hook_first
from backpack_core._torch import parametrizations_of
from backpack_core.engine.between import between
from backpack_core.engine.hooks import OutputHook
from backpack_core.errors import UsageError
from backpack_core.plugins.registry import Resolved, registry
from backpack_core.record.call import NOTHING, SITES, Call, Stored
from backpack_core.record.execution import Execution, simple_node
from backpack_core.record.models import OWNER_ATTRIBUTE, Owner, run_of_model
from backpack_core.record.nested import in_order, iter_tensors, tensors_in
from backpack_core.record.state import Traits, tensors_of, versions_and_frozen
from backpack_core.record.storage import storage
from backpack_core.record.switch import is_recording


class _Hook(partial[Any]):
    """A hook that raises a helpful error if ``torch.jit.script`` tries to compile it.

    It is copied and pickled by its name, as a plain function is.
    """

    @property
    def __name__(self) -> str:
        """The function's name; ``torch.jit.script`` asks for it before it compiles.

        Raises:
            UsageError: ``torch.jit.script`` asks.
        """
        if _torch.is_scripting():
            raise UsageError(
                "torch.jit.script compiles every hook of a module, and cannot compile those of "
                "extend(): call unextend(model) first, or script a copy of the model."
            )
        return self.func.__name__

    def __reduce__(self) -> str:
        """The name of a global of this module."""
        return self.func.__name__


def before_forward(module: Module, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    """The forward pre-hook: returns an :class:`Execution` instead of the keyword arguments.

    Quantisation copies hooks to modules of its own without saying that they take keyword arguments.
    """
    if kwargs is None or not is_recording() or not _hooks.take_places(module):
        return None
    execution = Execution(kwargs, tensors_in(args, in_order(module, kwargs) if kwargs else kwargs))
    if _hooks.HOOKS_OF_ALL:
        execution.place = storage().before_hooks_of_all(after_forward)
    if module._modules and parametrizations_of(module):
        storage().begin(module, execution)
    return args, execution


@_Hook
def after_forward(module: Module, args: tuple[Any, ...], kwargs: Any, result: Any = None) -> Any:
    """The forward hook: records the call on every differentiable output."""
    if type(kwargs) is not Execution:
        if not is_recording() or not isinstance(kwargs, dict):
            return pass_on(module, args, result) if is_recording(with_graph=False) else None
        # A user's pre-hook that runs after ours replaced the keyword arguments.
        kwargs = Execution(kwargs, ())
    if kwargs.is_recorded:
        return None
    if module._modules and parametrizations_of(module):
        storage().end(module, kwargs)
    if not torch.is_grad_enabled():
        return None
    replaced = _record(module, args, result, kwargs)
    kwargs.is_recorded = True
    # A user's hook may keep the keyword arguments, which must not keep the graph alive.
    kwargs.tensors, kwargs.edges, kwargs.place = (), (), None
    return replaced


def before_model(module: Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
    """The forward pre-hook of an extended model: notes where samples may lie in its inputs."""
    owner = _owner_of_model(module)
    if owner is not None:
        registry.look()
        if kwargs:
            kwargs = in_order(module, kwargs)
        owner.begin((*args, *kwargs.values()) if is_recording() else None, between().run_of)


@_Hook
def after_model(module: Module, args: Any, kwargs: Any, result: Any = None) -> None:
    """The forward hook of an extended model."""
    owner = _owner_of_model(module)
    if owner is not None:
        owner.end(iter_tensors(result))


def _owner_of_model(module: Module) -> Owner | None:
    owner = None if torch.compiler.is_compiling() else module.__dict__.get(OWNER_ATTRIBUTE)
    return owner if owner is not None and owner.is_of(module) else None


def _record(module: Module, args: tuple[Any, ...], result: Any, execution: Execution) -> Any:
    """Make the call; returns the result of the module if it must be replaced, else ``None``."""
    traits = between().traits_of(module)
    simple = simple_node(args, result, execution)
    if simple is not None:
        tensors: Any = (args, {}, args, (result,))
        call = make_call(module, traits, traits.resolved, tensors, execution, execution)
        attach(call, 0, result, *simple)
        return None
    if isinstance(result, Tensor) and result.grad_fn is None:
        return pass_on(module, args, result)
    return between().record(module, traits, args, result, execution)


def pass_on(module: Module, args: tuple[Any, ...], result: Any) -> None:
    """Note what a module with a rule made without a graph, from samples of a model."""
    run = run_of_model(module, get_ident())
    if run.sizes and not between().traits_of(module).resolved.is_fallback:
        # Only the first output: states of a recurrent layer have samples on another axis.
        run.pass_on(tensors_in(args, {}), [*iter_tensors(result)][:1])


def make_call(
    module: Module, traits: Traits, resolved: Resolved, tensors: Any, received: Any, of: Execution
) -> Call:
    """Make a call. Everything that may change before the backward pass is noted here.

    Args:
        module: The module.
        traits: What all of its calls have in common.
        resolved: The rule for this call; complex inputs have another one.
        tensors: Arguments, keyword arguments, the tensors among them, and the outputs.
        received: Has ``edges``, ``versions`` and ``is_rewired`` of the inputs: the execution in the
            usual case, else what a library found.
        of: The execution.
    """
    args, kwargs, inputs, outputs = tensors
    parameters: int | tuple[str, ...]
    if traits.is_whole and not module._modules:
        (owned, parameters), computed = tensors_of(module), NOTHING
    else:
        owned, parameters, computed = storage().tensors(module, resolved, of)
    detached = tuple(map(Tensor.detach, outputs))
    versions, frozen = versions_and_frozen(received.versions, detached, owned)
    stored = Stored(args, kwargs, inputs, detached, versions, owned, parameters, computed, frozen)
    thread, is_readable = get_ident(), _torch.saving_hooks() is None
    run, unpacks_twice = run_of_model(module, thread), is_readable
    if not is_readable:
        stored, run, unpacks_twice = storage().keep(stored, run)
    return Call(
        module,
        resolved.rule,
        resolved.provenance,
        received.edges,
        stored,
        thread,
        module.training,
        traits.settings,
        run,
        received.is_rewired,
        is_readable,
        unpacks_twice,
    )


def attach(call: Call, index: int, output: Tensor, node: Any, base: Tensor | None) -> None:
    """Record a call at one of its outputs, where no other call is recorded.

    Args:
        call: The call.
        index: The index of the output.
        output: The output.
        node: Its node.
        base: The base that it is a view of, if the module made the base, too.
    """
    if not call.is_readable and storage().is_computed_again():
        return  # a checkpoint needs the tensors of the call; passes inside of it do not count
    is_new = output.output_nr not in (sites := node.metadata.setdefault(SITES, {}))
    sites[output.output_nr] = call, index
    hook = OutputHook(call, index, output.output_nr)
    hook.hooks = weakref.ref(hook_first(output, node, hook, is_new))
    if base is not None:
        between().note_view(call, index, output, base)
