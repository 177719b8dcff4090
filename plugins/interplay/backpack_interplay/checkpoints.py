"""Makes torch's checkpoints return each saved tensor twice: to us, and then to autograd.

A checkpoint returns every recomputed tensor once. We call a node before autograd does, so the
tensor would be missing when autograd needs it. The tensors of our calls are saved through the same
hooks.

This file alone uses the private interface of checkpoints and of saved-tensor hooks. If a version of
torch lacks that of checkpoints, they return a tensor once. What torch 2.6 lacks of hooks, this file
brings: which are active, and how to save a tensor through them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import checkpoint as torch_checkpoint

from backpack_core import _torch
from backpack_core._torch import Node, has_memory, peek_transform, saving_hooks
from backpack_core.errors import BackpackError
from backpack_core.record.models import NO_RUN, still_running
from backpack_products.values import any_hooks

_unpacking = threading.local()


class _Unpacked(dict[Any, Any]):
    """A checkpoint's table of returned tensors, which our requests do not change."""

    def __setitem__(self, task: Any, handle: Any) -> None:
        if handle is not None or not getattr(_unpacking, "again", False):
            super().__setitem__(task, handle)


class _Holder(getattr(torch_checkpoint, "_Holder", object)):  # type: ignore[misc]
    """The object that a checkpoint stores instead of a saved tensor."""

    is_used = False

    def __init__(self) -> None:
        super().__init__()
        self.handles = _Unpacked()
        _Holder.is_used = True


@cache
def watched_hooks() -> Callable[[bool], tuple[Any, ...] | None]:
    """A function that returns the active saved-tensor hooks, for torch without one (2.6).

    The result is an empty tuple for hooks that were entered before this file was imported.
    """
    autograd: Any = torch._C._autograd
    push, pop = (
        autograd._push_saved_tensors_default_hooks,
        autograd._pop_saved_tensors_default_hooks,
    )
    here = threading.local()  # a stack for each thread, like torch's own

    def pushed(*hooks: Any) -> None:
        push(*hooks)
        here.__dict__.setdefault("stack", []).append(hooks)

    def popped() -> None:
        pop()
        if here.__dict__.get("stack"):  # else the hooks were pushed before this import
            here.stack.pop()

    autograd._push_saved_tensors_default_hooks = pushed
    autograd._pop_saved_tensors_default_hooks = popped
    return lambda _: (here.__dict__.get("stack") or (any_hooks(True),))[-1]


def let_checkpoints_give_again() -> None:
    """Have all later checkpoints return saved tensors to us and to autograd."""
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        _torch._top_hooks = watched_hooks()
    if hasattr(torch_checkpoint, "_Holder"):
        torch_checkpoint._Holder = _Holder  # type: ignore[misc]
        torch_checkpoint._recomputation_hook = _run_again  # type: ignore[misc,assignment]
        torch_checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]


class Recomputed(dict[tuple[Any, Any], int]):
    """The bytes of recomputed tensors that checkpoints hold for chunks of columns.

    The tensors are held because the next chunk needs them, too. If they exceed a bound, those of
    the largest checkpoint are dropped, and recomputed when they are needed. Keys are a checkpoint's
    frame (one run of its function) and autograd's graph task.
    """

    @contextmanager
    def within(self, bound: int) -> Iterator[None]:
        """Hold recomputed tensors inside the block; after it, no more than ``bound`` bytes."""
        before, self._bound = getattr(_unpacking, "recomputed", None), bound
        _unpacking.recomputed = self
        try:
            yield
        finally:
            _unpacking.recomputed = before
            self._shrink()

    def begin(self, frame: Any, task: Any) -> None:
        """Before a checkpoint recomputes, count the bytes of the others, and drop the excess."""
        self._shrink()
        self[frame, task] = 0

    def _shrink(self) -> None:
        for (reference, task), size in list(self.items()):
            frame = reference()
            # A recomputation that began a nested one is still running: it must not be dropped.
            is_settled = size or frame is None or not frame.is_recomputed[task]
            tensors = () if is_settled else filter(has_memory, frame.recomputed[task].values())
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
            self[reference, task] = size or sum(s.nbytes() for s in storages.values())
        while sum(self.values()) > self._bound:
            largest = max(reversed(self), key=self.__getitem__)  # the latest of equal ones
            _forget_run(largest[0](), largest[1])
            del self[largest]


def _forget_run(frame: Any, task: Any) -> None:
    """Drop the recomputed tensors of a checkpoint, which then recomputes when asked again."""
    if frame is not None:
        frame.is_recomputed[task], frame.recomp_counter[task] = False, 0
        for holder in filter(None, [reference() for reference in frame.weak_holders]):
            holder.handles.pop(task, None)


_enter: Any = getattr(torch_checkpoint, "_recomputation_hook", None)


def _run_again(frame: Any, task: Any) -> Any:
    """The context in which a checkpoint recomputes; its size will be counted."""
    if (recomputed := getattr(_unpacking, "recomputed", None)) is not None:
        recomputed.begin(frame, task)
    return _enter(frame, task)


@cache
def _saved_by(kind: type) -> tuple[str, ...]:
    """The attributes of a type of node that return saved tensors."""
    names = [name for name in dir(kind) if name.startswith("_saved_")]
    return (*names, "saved_tensors") if hasattr(kind, "saved_tensors") else tuple(names)


@contextmanager
def unpacking_again(node: Node) -> Iterator[None]:
    """A block in which a node's saved tensors can be read, and later once more by autograd.

    A checkpoint recomputes at the first request. This happens at the beginning of the block, since
    it must not happen under vmap.
    """
    if not _Holder.is_used:
        yield
        return
    with _again():
        for name in _saved_by(type(node)):
            try:
                getattr(node, name)
            except RuntimeError as error:
                if isinstance(error, (torch_checkpoint.CheckpointError, BackpackError)):
                    raise  # else it was freed or changed: calling the node raises the error
        yield


@contextmanager
def _again() -> Iterator[None]:
    """A block in which requests do not count as autograd's."""
    before = getattr(_unpacking, "again", False)
    _unpacking.again = True
    try:
        yield
    finally:
        _unpacking.again = before


class SavedTensor(Protocol):
    """Autograd's object for a saved tensor: ``torch._C._autograd.SavedTensor``."""

    def unpack(self) -> Tensor:
        """Return the tensor; can be called any number of times."""


class _Saving(torch.autograd.Function):
    """An operation that does nothing but save a tensor."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return leaf.detach()


class SavedByNode:
    """A saved tensor, for torch without a function that saves one (2.6): a node's."""

    def __init__(self, tensor: Tensor, is_output: bool) -> None:
        """Save a tensor, which is an input of the node."""
        leaf = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            # It owns the node.
            self._output: Any = _Saving.apply(leaf, tensor)  # type: ignore[no-untyped-call]

    def unpack(self) -> Tensor:
        """Return the tensor; can be called any number of times."""
        saved: tuple[Tensor] = self._output.grad_fn.saved_tensors
        return saved[0]


_make: Any = getattr(torch._C._autograd, "_make_saved_tensor", SavedByNode)
# Attributes of a checkpoint's frame: the numbers of its saved tensors that are ours; and whether
# nested re-entrant checkpoints became part of its graph.
_OURS, _INNER = "_backpack_saved", "_backpack_inner"


class _Hook(NamedTuple):
    """The innermost hook on saved tensors.

    Attributes:
        frame: A checkpoint's record of one run of its function; ``None`` for other hooks.
        task: The graph task for which a checkpoint recomputes; ``None`` in the forward pass.
        is_foreign: Whether the hook belongs to no checkpoint, or torch does not tell.
    """

    frame: Any
    task: Any
    is_foreign: bool

    @property
    def unpacks_twice(self) -> bool:
        """Whether both we and autograd can get a tensor that this hook packs."""
        return not self.is_foreign and getattr(torch_checkpoint, "_Holder", None) is _Holder


def saving_hook() -> _Hook | None:
    """The hook that currently packs autograd's saved tensors; ``None`` if there is none."""
    hooks = saving_hooks()
    if hooks is None:
        return None
    if not hooks:
        return _Hook(None, None, True)
    pack = inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", "") != torch_checkpoint.__name__:
        return _Hook(None, None, True)
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells}
    if "target_frame_ref" in closure:  # the hook of a recomputation
        return _Hook(closure["target_frame_ref"](), closure.get("gid"), False)
    return _Hook(closure.get("frame"), None, False)


def is_computed_again() -> bool:
    """Whether a checkpoint is recomputing; it then expects the same saved tensors as before."""
    return getattr(saving_hook(), "task", None) is not None


def save(tensor: Tensor) -> SavedTensor | None:
    """Save a tensor as autograd does, through the current hooks; ``None`` if that is impossible.

    A checkpoint identifies recomputed tensors by the order in which they are saved. So during
    recomputation we save exactly where we saved in the forward pass.
    """
    hook = saving_hook()
    if hook is None or not (hook.is_foreign or hasattr(hook.frame, "__dict__")):
        return None
    if not hook.is_foreign:
        ours: set[int] = hook.frame.__dict__.setdefault(_OURS, set())
        if hook.task is None:
            ours.add(len(hook.frame.weak_holders))
        elif hook.frame.recomp_counter[hook.task] not in ours:
            return None
    saved: SavedTensor = _make(tensor, False)
    return saved


_Reentrant: Any = torch_checkpoint.CheckpointFunction


class CheckpointFunction(_Reentrant):  # type: ignore[misc]
    """A re-entrant checkpoint that becomes non-re-entrant inside an extended model.

    A re-entrant checkpoint has its own graph in the backward pass, which only autograd's gradient
    enters.
    """

    @classmethod
    def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Run with ``use_reentrant=False`` inside an extended model; elsewhere as torch does."""
        if cls is not CheckpointFunction:  # a derived class
            return super().apply(function, preserve_rng_state, *args)
        # A re-entrant checkpoint without an input that needs a gradient gives its parameters none.
        needs_grad = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if needs_grad and torch.is_grad_enabled() and cls._is_inside():
            return torch_checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )
        # Other code compares this type.
        return _Reentrant.apply(function, preserve_rng_state, *args)

    @classmethod
    def _is_inside(cls) -> bool:
        """Whether an extended model runs, or, during recomputation, ran in the forward pass."""
        hook = saving_hook()
        frame = None if hook is None else hook.frame
        if hook is not None and hook.task is not None:
            return hasattr(frame, _INNER)
        is_inside = any(run is not NO_RUN for _, run in still_running())
        if is_inside and frame is not None:
            setattr(frame, _INNER, True)
        return is_inside


def unpack(saved: SavedTensor) -> Tensor:
    """Return a saved tensor, which can be requested again.

    Hooks, and recomputations of checkpoints, run outside transforms of ``torch.func``.
    """
    with (
        _again(),
        nullcontext() if peek_transform() is None else temporarily_clear_interpreter_stack(),
    ):
        return saved.unpack()
