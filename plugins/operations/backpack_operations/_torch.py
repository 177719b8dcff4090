"""Every use of torch's private interface in this package, except core's. Imports torch only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node, here, will_execute

# The type of the nodes of in-place operations on a view.
CopyNode: Any = torch._C._functions.CopySlices  # type: ignore[attr-defined]
# Functions whose backward returns its gradient unchanged, with a side effect: they call hooks of a
# module, or begin an exchange between replicas or shards. By name, since importing them takes long.
_HANDING_ON = {
    "torch.nn.modules._functions.BackwardHookFunction",
    "torch.nn.parallel.distributed._DDPSink",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction",
}


def modes() -> tuple[type, ...]:
    """The classes of the modes on this thread that may replace functions of torch."""
    torch_c: Any = torch._C
    stack = map(torch_c._get_function_stack_at, range(torch_c._len_torch_function_stack()))
    return tuple(map(type, stack))


def metadata_of(node: Node, output_nr: int) -> Any:
    """Shape, dtype and device of an output of a node; of a leaf's node, the leaf itself."""
    variable = getattr(node, "variable", None)
    return node._input_metadata[output_nr] if variable is None else variable


@cache
def operations() -> dict[type, str]:
    """The names of torch's operations, by the type of node: ``AddBackward0`` is ``Add``."""
    names = {}
    for name, kind in vars(torch._C._functions).items():
        match = re.fullmatch(r"(\w+)Backward\d+(_copy)?", name)
        if match is not None:
            names[kind] = match[1]
    return names


@cache
def hands_on(kind: type) -> bool:
    """Whether nodes of a type return their gradient unchanged, with side effects to happen once."""
    function = getattr(kind, "_forward_cls", None)
    return f"{function.__module__}.{function.__qualname__}" in _HANDING_ON if function else False


def is_saved_plainly(node: Node) -> bool:
    """Whether no hook has packed what a node saved, so that it may be read at any time.

    A checkpoint hands out each tensor once. Torch before 2.7 does not tell.
    """
    found = [getattr(node, name) for name in _raw_names(type(node))]
    saved = [one for each in found for one in (each if isinstance(each, tuple) else (each,))]
    return all(getattr(one, "unpack_hook", saved) is None for one in saved)


@cache
def _raw_names(kind: type) -> tuple[str, ...]:
    return tuple([name for name in dir(kind) if name.startswith("_raw_saved_")])


def is_operator(kind: type) -> bool:
    """Whether nodes of a type are those of operators with a formula from ``torch.library``."""
    function = getattr(kind, "_forward_cls", None)
    return getattr(function, "__module__", "") == "torch._library.autograd"


def node_type(name: str) -> type | None:
    """The type of torch's own nodes with a name; ``None`` if this version has no such type."""
    kind: type | None = getattr(torch._C._functions, name, None)
    return kind


def vmapped(
    function: Callable[..., dict[int, Tensor]], tensors: Sequence[Tensor]
) -> dict[int, Tensor]:
    """``torch.vmap(function)(*tensors)``, without its checks, which take nine tenths of its time.

    Torch does not warn that it loops over an operation, either, which only costs time.
    """
    functorch: Any = torch._C._functorch
    _load_decompositions()
    size = len(tensors[0])
    functorch._set_vmap_fallback_warning_enabled(False)
    level = functorch._vmap_increment_nesting(size, "error")
    try:
        found = function(*[functorch._add_batch_dim(tensor, 0, level) for tensor in tensors])
        return {key: functorch._remove_batch_dim(t, level, size, 0) for key, t in found.items()}
    finally:
        functorch._vmap_decrement_nesting()
        functorch._set_vmap_fallback_warning_enabled(True)


@cache
def _load_decompositions() -> None:
    """Load the formulas that torch batches some operations by; it does so at the first vmap."""
    from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]

    lazy_load_decompositions()


@contextmanager
def without_backward(refusal: Callable[[], Exception]) -> Iterator[None]:
    """A block in which a pass that adds to ``.grad`` raises an error on this thread.

    ``Tensor.backward`` and ``torch.autograd.backward`` do, ``torch.autograd.grad`` does not.

    Args:
        refusal: Makes the error.
    """
    before = getattr(here, "refusal", None)
    here.refusal = refusal
    try:
        yield
    finally:
        here.refusal = before


def will_get_gradient(tensor: Tensor) -> bool:
    """Whether the current backward pass computes the gradient of a parameter."""
    return will_get_to(torch.autograd.graph.get_gradient_edge(tensor).node)


def will_get_to(node: Node) -> bool:
    """Whether the current backward pass gets to a node, which may be that of a leaf."""
    try:
        return will_execute(node)
    except RuntimeError:  # torch does not tell for leaves that autograd.grad() was called with
        return True


def at_end_of_pass(function: Callable[[], None]) -> None:
    """Have autograd call a function at the end of the current backward pass."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)
