"""Every use of torch's private interface, except for hooks and checkpoints. Imports torch only.

When torch changes, this is the file to read. Each function says what happens if torch no longer has
what it uses: it becomes slower or more careful, but never means something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import Lock, local
from types import FrameType
from typing import Any

import torch
from torch import Tensor
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
# The tracing state of ``torch.jit``; ``None`` if nothing is traced.
tracing_state: Callable[[], Any] = torch._C._get_tracing_state
# The innermost transform of ``torch.func`` that is active, if any.
peek_transform: Callable[[], Any] = getattr(
    torch._C._functorch, "peek_interpreter_stack", lambda: None
)
_will_execute: Callable[[Node], bool] = getattr(
    torch._C, "_will_engine_execute_node", lambda node: True
)
_keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", torch.is_grad_enabled
)
# Whether autocast is on for any device; if torch cannot tell, callers ask for each device.
casts: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def will_execute(node: Node) -> bool:
    """Whether the current backward pass reaches a node; ``inputs=...`` excludes some."""
    # Torch does not count the node at which the pass began. A pass of ours that runs without
    # autograd has no graph task, and reaches all nodes.
    return graph_task_id() < 0 or _will_execute(node) or node is current_node()


def is_end(node: Node) -> bool:
    """Whether the current backward pass needs nothing behind a node, and so does not run it."""
    try:
        return not any(will_execute(n) for n, _ in node.next_functions if n is not None)
    except RuntimeError:  # a leaf that torch.autograd.grad() was called with
        return False


def keeps_graph() -> bool:
    """Whether the graph is kept after the current backward pass."""
    # With create_graph=True, grad mode is on inside hooks.
    return torch.is_grad_enabled() or _keeps_graph()


# ``refusal``: makes the error for a pass that would add to ``.grad`` on this thread.
here = local()


class EngineEntry:
    """A context manager that replaces the function by which torch enters its autograd engine.

    ``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all look up one
    function in ``torch.autograd``, so nothing else in torch becomes slower. Several threads may be
    inside at once.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Take the replacement.

        Args:
            function: Called with the original function, and the arguments that torch passes.
        """
        self._function, self._lock, self._inside = function, Lock(), 0
        self._autograd: Any = torch.autograd
        self._original = self._autograd._engine_run_backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch to run the engine."""
        if kwargs.get("accumulate_grad") and (refusal := getattr(here, "refusal", None)):
            raise refusal()
        return self._function(self._original, *args, **kwargs)

    def __enter__(self) -> None:
        """Replace the function, unless another thread has done so."""
        with self._lock:
            if not self._inside:
                self._original = self._autograd._engine_run_backward
                self._autograd._engine_run_backward = self
            self._inside += 1

    def __exit__(self, *exc_info: object) -> None:
        """Restore it, unless another thread is inside or somebody else has replaced it since."""
        with self._lock:
            self._inside -= 1
            if not self._inside and self._autograd._engine_run_backward is self:
                self._autograd._engine_run_backward = self._original


def are_batched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether any tensor is batched by ``vmap``, as in ``grad(..., is_grads_batched=True)``."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return any(tensor is not None and is_batched(tensor) for tensor in tensors)


_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__


def running_passes() -> list[bool]:
    """For each backward pass on this thread, innermost first: whether a Python function began it.

    This function is the backward of an ``autograd.Function``, such as that of a reentrant
    checkpoint. Other nested passes are begun by hooks. Passes begun on other threads are not seen.
    """
    passes: list[bool] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            passes.append(False)
        elif frame.f_code is _FUNCTION and passes:
            passes[-1] = True
        frame = frame.f_back
    return passes


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
    """The version counter of a tensor (how often it was changed in place); zero if it has none."""
    try:
        return tensor._version
    except RuntimeError:  # of an inference tensor
        return 0


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """The version counters of several tensors, without those that are ``None``."""
    return [version_of(tensor) for tensor in tensors if tensor is not None]


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has strided memory, which sparse and nested tensors do not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def memory_of(tensor: Tensor) -> int:
    """A number that identifies the memory of a tensor, which it shares with its views."""
    number: int = tensor.untyped_storage()._cdata
    return number


def memories_of(tensors: Iterable[Tensor]) -> set[int]:
    """The numbers of the memory of several tensors."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def base_of(tensor: Tensor) -> Tensor | None:
    """The base of a view; ``None`` for other tensors."""
    return tensor._base if tensor._is_view() else None


def is_scripting() -> bool:
    """Whether ``torch.jit.script`` is the caller's caller."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.jit._recursive"


def parametrizations_of(module: Module) -> dict[str, Module]:
    """The modules that compute a module's parametrized tensors, by name of the tensor."""
    if "parametrizations" not in module._modules or not parametrize.is_parametrized(module):
        return {}
    table: Any = module.parametrizations
    return dict(table.items())


def class_of(module: Module) -> type[Module]:
    """A module's class; for a parametrized module, the class before torch replaced it."""
    if "parametrizations" not in module._modules:
        return type(module)
    original: type[Module] = parametrize.type_before_parametrizations(module)
    return original


# Torch 2.6 does not tell which are active; a library puts another function in its place.
_top_hooks: Callable[[bool], tuple[Any, ...] | None] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)


def saving_hooks() -> tuple[Any, ...] | None:
    """The active saved-tensor hooks, ``None`` if none are active; empty if torch does not tell.

    Called for every call that is recorded.
    """
    try:
        return _top_hooks(False)
    except TypeError:  # the function is private, and its arguments have changed before
        return ()
