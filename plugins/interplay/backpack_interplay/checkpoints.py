"""Makes torch's checkpoints give each saved tensor twice: to us, and then to autograd.

A checkpoint hands out every recomputed tensor once. We cross a node before autograd does, so the
tensor would be gone when autograd asks. The tensors of our calls are saved through the same hooks.

The private interface of checkpoints and of saved-tensor hooks is used here only; ``_torch.py`` has
the rest of torch's. Where it is no longer offered, a checkpoint gives a tensor once, and says so,
and tensors of ours are kept in memory. Imports ``_torch`` only.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import checkpoint as torch_checkpoint

from backpack_core._torch import Node, peek_transform, saving_hooks
from backpack_core.record.owner import model_runs

_unpacking = threading.local()


class _Unpacked(dict[Any, Any]):
    """A checkpoint's note of what it has given out; :func:`unpacking_again` leaves none."""

    def __setitem__(self, task: Any, handle: Any) -> None:
        if handle is not None or not getattr(_unpacking, "again", False):
            super().__setitem__(task, handle)


class _Holder(getattr(torch_checkpoint, "_Holder", object)):  # type: ignore[misc]
    """What a checkpoint keeps instead of a saved tensor."""

    is_used = False

    def __init__(self) -> None:
        super().__init__()
        self.handles = _Unpacked()
        _Holder.is_used = True


def let_checkpoints_give_again() -> None:
    """Have later checkpoints give saved tensors to us and to autograd."""
    if hasattr(torch_checkpoint, "_Holder"):
        torch_checkpoint._Holder = _Holder  # type: ignore[misc]
        torch_checkpoint._recomputation_hook = _run_again  # type: ignore[misc,assignment]
        torch_checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]


class Recomputed(dict[tuple[Any, Any], int]):
    """How many bytes checkpoints hold recomputed for chunks of columns, by frame and task.

    They are held because the next chunk needs them, too. Beyond a bound, the largest is dropped,
    and recomputed when it is needed.
    """

    @contextmanager
    def within(self, bound: int) -> Iterator[None]:
        """Inside this block, hold what is recomputed; afterwards, no more than ``bound`` bytes."""
        before, self._bound = getattr(_unpacking, "recomputed", None), bound
        _unpacking.recomputed = self
        try:
            yield
        finally:
            _unpacking.recomputed = before
            self._shrink()

    def begin(self, frame: Any, task: Any) -> None:
        """A checkpoint is about to run again: count what the others hold, and drop the excess."""
        self._shrink()
        self[frame, task] = 0

    def _shrink(self) -> None:
        for (other, its), known in list(self.items()):
            frame = other()
            # A run that has begun another one is still going on: nothing of it may be dropped.
            is_settled = known or frame is None or not frame.is_recomputed[its]
            tensors = () if is_settled else frame.recomputed[its].values()
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
            self[other, its] = known or sum(storage.nbytes() for storage in storages.values())
        while sum(self.values()) > self._bound:
            largest = max(reversed(self), key=self.__getitem__)  # the latest of these
            _forget_run(largest[0](), largest[1])
            del self[largest]


def _forget_run(frame: Any, task: Any) -> None:
    if frame is not None:
        frame.is_recomputed[task], frame.recomp_counter[task] = False, 0
        for holder in filter(None, [reference() for reference in frame.weak_holders]):
            holder.handles.pop(task, None)


_enter: Any = getattr(torch_checkpoint, "_recomputation_hook", None)


def _run_again(frame: Any, task: Any) -> Any:
    """The context in which a checkpoint runs its function again; it is counted first."""
    if (recomputed := getattr(_unpacking, "recomputed", None)) is not None:
        recomputed.begin(frame, task)
    return _enter(frame, task)


@cache
def _saved_by(kind: type) -> tuple[str, ...]:
    names = [name for name in dir(kind) if name.startswith("_saved_")]
    return (*names, "saved_tensors") if hasattr(kind, "saved_tensors") else tuple(names)


@contextmanager
def unpacking_again(node: Node) -> Iterator[None]:
    """Inside this block, a node's saved tensors can be read, and once more later, by autograd.

    A checkpoint runs its function at the first request. That is at the beginning of this block, so
    that it does not happen under vmap.
    """
    if not _Holder.is_used:
        yield
        return
    with _again():
        for name in _saved_by(type(node)):
            with suppress(RuntimeError):  # it was freed, and the node itself will say so
                getattr(node, name)
        yield


@contextmanager
def _again() -> Iterator[None]:
    before = getattr(_unpacking, "again", False)
    _unpacking.again = True
    try:
        yield
    finally:
        _unpacking.again = before


class SavedTensor(Protocol):
    """What autograd keeps of a tensor that it saved: ``torch._C._autograd.SavedTensor``."""

    def unpack(self) -> Tensor:
        """Return the tensor; may be called any number of times."""


_make: Any = getattr(torch._C._autograd, "_make_saved_tensor", None)
_OURS = "_backpack_saved"  # on a checkpoint's frame: which of its saved tensors are ours
_INNER = "_backpack_inner"  # on a frame: whether checkpoints inside became part of its graph


class _Hook(NamedTuple):
    """The innermost hook on saved tensors.

    Attributes:
        frame: What a checkpoint knows of one run of its function; ``None`` for other hooks.
        task: The backward pass for which it recomputes; ``None`` in the forward pass.
        is_foreign: Whether it belongs to no checkpoint but to somebody who packs by value, or torch
            does not tell.
    """

    frame: Any
    task: Any
    is_foreign: bool

    @property
    def unpacks_twice(self) -> bool:
        """Whether a tensor that it takes can be had by us and by autograd."""
        return not self.is_foreign and getattr(torch_checkpoint, "_Holder", None) is _Holder


def saving_hook() -> _Hook | None:
    """The hook that autograd's saved tensors go through now; ``None`` if there is none."""
    hooks = saving_hooks()
    if hooks is None:
        return None
    if not hooks:
        return _Hook(None, None, True)
    pack = inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", "") != torch_checkpoint.__name__:
        return _Hook(None, None, True)
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    known = {name: cell.cell_contents for name, cell in cells}
    if "target_frame_ref" in known:
        return _Hook(known["target_frame_ref"](), known.get("gid"), False)
    return _Hook(known.get("frame"), None, False)


def is_computed_again() -> bool:
    """Whether a checkpoint is recomputing, and expects the same saved tensors as before."""
    return getattr(saving_hook(), "task", None) is not None


def save(tensor: Tensor) -> SavedTensor | None:
    """Save a tensor as autograd does, through the current hooks; ``None`` where it cannot.

    A checkpoint recognises what it recomputes by the order in which tensors are saved. So during
    recomputation we save exactly where we saved in the forward pass.
    """
    hook = saving_hook()
    if _make is None or hook is None or not (hook.is_foreign or hasattr(hook.frame, "__dict__")):
        return None
    if not hook.is_foreign:
        ours: set[int] = hook.frame.__dict__.setdefault(_OURS, set())
        if hook.task is None:
            ours.add(len(hook.frame.weak_holders))
        elif hook.frame.recomp_counter[hook.task] not in ours:
            return None
    found: SavedTensor = _make(tensor, False)
    return found


_Reentrant: Any = torch_checkpoint.CheckpointFunction


class CheckpointFunction(_Reentrant):  # type: ignore[misc]
    """A re-entrant checkpoint; inside an extended model, it becomes part of the model's graph.

    The backward pass of a re-entrant one has a graph of its own, through which only a gradient
    goes.
    """

    @classmethod
    def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Run with ``use_reentrant=False`` inside an extended model; elsewhere as torch would."""
        if cls is not CheckpointFunction:  # a class that was made of this one
            return super().apply(function, preserve_rng_state, *args)
        # Without an input that needs a gradient, a re-entrant checkpoint gives parameters none.
        wants = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if wants and torch.is_grad_enabled() and cls._is_inside():
            return torch_checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )
        return _Reentrant.apply(function, preserve_rng_state, *args)  # its type is known

    @classmethod
    def _is_inside(cls) -> bool:
        """Whether an extended model runs; during recomputation, whether one ran before."""
        hook = saving_hook()
        frame = None if hook is None else hook.frame
        if hook is not None and hook.task is not None:
            return hasattr(frame, _INNER)
        if model_runs() and frame is not None:
            setattr(frame, _INNER, True)
        return model_runs()


def unpack(saved: SavedTensor) -> Tensor:
    """Ask for a tensor, and maybe once more.

    Hooks, and what checkpoints compute again, run outside of transforms of ``torch.func``.
    """
    with (
        _again(),
        nullcontext() if peek_transform() is None else temporarily_clear_interpreter_stack(),
    ):
        return saved.unpack()
