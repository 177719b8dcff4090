"""Every use of torch's private interface, except for hooks and checkpoints. Imports torch only.

So that one file has to be read when torch changes. Each function says what happens if torch no
longer offers what it uses: something slower or more careful, never another meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import Lock, local
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from backpack_core.errors import add_library_folder

add_library_folder(torch.__file__)

Node = torch.autograd.graph.Node

# The type of the nodes of leaves.
LeafNode: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


# The backward pass that autograd is running on this thread; -1 outside of one.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
# The autograd node whose hooks, or whose formula, are running.
current_node: Callable[[], Any] = torch._C._current_autograd_node
# The tracing state of ``torch.jit``; ``None`` where it is not looking.
tracing_state: Callable[[], Any] = torch._C._get_tracing_state
# The transform of ``torch.func`` that is tracing, if any is.
peek_transform: Callable[[], Any] = getattr(
    torch._C._functorch, "peek_interpreter_stack", lambda: None
)
_will_execute: Callable[[Node], bool] = getattr(
    torch._C, "_will_engine_execute_node", lambda node: True
)
_keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", torch.is_grad_enabled
)
# Whether autocast is on for any device; where torch does not tell, each has to be asked.
casts: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def will_execute(node: Node) -> bool:
    """Whether the current backward pass gets to a node; ``inputs=...`` leaves some out."""
    # Torch does not count the node that the pass began at. A pass of our own, without a graph task
    # of autograd, gets everywhere.
    return graph_task_id() < 0 or _will_execute(node) or node is current_node()


def will_get_gradient(tensor: Tensor) -> bool:
    """Whether the current backward pass computes the gradient of a parameter that it gets to."""
    try:
        return will_execute(torch.autograd.graph.get_gradient_edge(tensor).node)
    except RuntimeError:  # autograd.grad() was asked for this leaf: torch does not tell
        return True


def at_end_of_pass(function: Callable[[], None]) -> None:
    """Have autograd call a function when the current backward pass is through."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def keeps_graph() -> bool:
    """Whether the graph outlives the current backward pass."""
    # With create_graph=True, grad mode is on inside hooks.
    return torch.is_grad_enabled() or _keeps_graph()


class EngineEntry:
    """Stands before autograd's engine while it is entered; several threads may be inside at once.

    ``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all call one
    function, by its name in ``torch.autograd``. So nothing else of torch becomes slower.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Begin.

        Args:
            function: Called with what torch calls, and the arguments of the call.
        """
        self._function, self._lock, self._inside = function, Lock(), 0
        self._autograd: Any = torch.autograd
        self._original = self._autograd._engine_run_backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch, to start the engine."""
        return self._function(self._original, *args, **kwargs)

    def __enter__(self) -> None:
        """Take the place, if no thread did."""
        with self._lock:
            if not self._inside:
                self._original = self._autograd._engine_run_backward
                self._autograd._engine_run_backward = self
            self._inside += 1

    def __exit__(self, *exc_info: object) -> None:
        """Give it back, if no other thread is inside and nobody took it from us."""
        with self._lock:
            self._inside -= 1
            if not self._inside and self._autograd._engine_run_backward is self:
                self._autograd._engine_run_backward = self._original


def are_batched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether any tensor stands for several, as in ``grad(..., is_grads_batched=True)``."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return any(tensor is not None and is_batched(tensor) for tensor in tensors)


_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__


def running_passes() -> list[bool]:
    """The backward passes that run on this thread, innermost first: whether a function began each.

    That is the backward of a Python ``autograd.Function``, as a checkpoint's; else a hook began it,
    or nothing did. Of one that was begun on another thread, this thread does not know.
    """
    found: list[bool] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            found.append(False)
        elif frame.f_code is _FUNCTION and found:
            found[-1] = True
        frame = frame.f_back
    return found


def running_calls(module: Module | None) -> int:
    """How many calls of a module are running on this thread; several if it calls itself."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    code = Module._wrapped_call_impl.__code__
    while frame is not None:
        count += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


def is_distributed(module: Module | None = None) -> bool:
    """Whether the forward pass of a DistributedDataParallel is running, or is about to."""
    running = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return running is not None or isinstance(module, DistributedDataParallel)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place (its version); zero where torch does not count."""
    try:
        return tensor._version
    except RuntimeError:  # of an inference tensor
        return 0


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """The versions of several tensors; ``None`` among them is skipped."""
    return [version_of(tensor) for tensor in tensors if tensor is not None]


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has a strided memory of its own: sparse and nested ones have not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def memory_of(tensor: Tensor) -> int:
    """A number that identifies the memory of a tensor; views share it."""
    found: int = tensor.untyped_storage()._cdata
    return found


def memories_of(tensors: Iterable[Tensor]) -> set[int]:
    """The same of several."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def hold_address(tensor: Tensor) -> object:
    """An object; while it lives, :func:`memory_of` gives the number to no other memory."""
    return StorageWeakRef(tensor.untyped_storage())


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that a view looks at."""
    return tensor._base if tensor._is_view() else None


def is_scripting() -> bool:
    """Whether ``torch.jit.script``, two calls up, asks what a module consists of."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.jit._recursive"


def parametrizations_of(module: Module) -> dict[str, Module]:
    """The modules that compute a module's parametrized tensors, by name of the tensor."""
    if "parametrizations" not in module._modules or not parametrize.is_parametrized(module):
        return {}
    table: Any = module.parametrizations
    return dict(table.items())


def class_of(module: Module) -> type[Module]:
    """A module's class; where torch derived one for parametrizations, the original."""
    if "parametrizations" not in module._modules:
        return type(module)
    original: type[Module] = parametrize.type_before_parametrizations(module)
    return original


def _watched() -> Callable[[bool], tuple[Any, Any] | None]:
    """The hooks that autograd's saved tensors go through, where torch does not tell (2.6)."""
    autograd: Any = torch._C._autograd
    push, pop = (
        autograd._push_saved_tensors_default_hooks,
        autograd._pop_saved_tensors_default_hooks,
    )
    here = local()  # as torch's own stack of them

    def pushed(*hooks: Any) -> None:
        push(*hooks)
        here.__dict__.setdefault("stack", []).append(hooks)

    def popped() -> None:
        pop()
        if here.__dict__.get("stack"):  # else those were there before
            here.stack.pop()

    autograd._push_saved_tensors_default_hooks = pushed
    autograd._pop_saved_tensors_default_hooks = popped
    return lambda _: (here.__dict__.get("stack") or (None,))[-1]


_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
if _top_hooks is None:
    _top_hooks = _watched()


def saving_hooks() -> tuple[Any, ...] | None:
    """The hooks that autograd's saved tensors go through now; empty where torch does not tell.

    Asked for every call that is recorded.
    """
    try:
        found: tuple[Any, ...] | None = _top_hooks(False)
    except TypeError:  # it is not public, and its arguments have changed before
        return ()
    return found
