"""Torch's checkpoints give each saved tensor once: has them give it to us, and to autograd.

Tensors of ours are saved beside those of autograd, through the same hooks. The private interface of
both is used here, as the rest of torch's is in ``_torch.py``; where it is no longer offered, a
checkpoint gives once, and says so, and tensors of ours are kept. Imports ``_torch`` only.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import checkpoint as torch_checkpoint

from backpack_core._torch import Node, peek_transform

_unpacking = threading.local()


class _Unpacked(dict[Any, Any]):
    """Where a checkpoint notes what it has given: for :func:`unpacking_again`, it is not noted."""

    def __setitem__(self, task: Any, handle: Any) -> None:
        if handle is not None or not getattr(_unpacking, "again", False):
            super().__setitem__(task, handle)


class _Holder(getattr(torch_checkpoint, "_Holder", object)):  # type: ignore[misc]
    """What a checkpoint keeps in the place of a saved tensor."""

    is_used = False

    def __init__(self) -> None:
        super().__init__()
        self.handles = _Unpacked()
        _Holder.is_used = True


def let_checkpoints_give_again(model_runs: Callable[[], bool]) -> None:
    """Have later checkpoints give saved tensors to us and to autograd.

    Args:
        model_runs: Whether an extended model runs on this thread, and is recorded.
    """
    if hasattr(torch_checkpoint, "_Holder"):
        torch_checkpoint._Holder = _Holder  # type: ignore[misc]
        torch_checkpoint._recomputation_hook = _run_again  # type: ignore[misc,assignment]
        CheckpointFunction.model_runs = staticmethod(model_runs)
        torch_checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]


class Recomputed(dict[tuple[Any, Any], int]):
    """Bytes of what checkpoints computed again for chunks of columns, by frame and task.

    The next chunk wants it, too. Beyond a bound, the largest is dropped, and computed then.
    """

    @contextmanager
    def within(self, bound: int) -> Iterator[None]:
        """Drop what exceeds a number of bytes, as long as this block is not left."""
        before, self._bound = getattr(_unpacking, "recomputed", None), bound
        _unpacking.recomputed = self
        try:
            yield
        finally:
            _unpacking.recomputed = before
            self._shrink()

    def begin(self, frame: Any, task: Any) -> None:
        """A checkpoint runs again: what others have is counted, and dropped."""
        self._shrink()
        self[frame, task] = 0

    def _shrink(self) -> None:
        for (other, its), known in list(self.items()):
            frame = other()
            # A run that began another one is not through yet: nothing of it may be dropped.
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
    """What a checkpoint enters to run again."""
    if (recomputed := getattr(_unpacking, "recomputed", None)) is not None:
        recomputed.begin(frame, task)
    return _enter(frame, task)


@cache
def _saved_by(kind: type) -> tuple[str, ...]:
    names = [name for name in dir(kind) if name.startswith("_saved_")]
    return (*names, "saved_tensors") if hasattr(kind, "saved_tensors") else tuple(names)


@contextmanager
def unpacking_again(node: Node) -> Iterator[None]:
    """What a node saved is asked for, and will be once more: a checkpoint holds it until then.

    The checkpoint runs its function at the first time. That is now, and not under vmap.
    """
    if not _Holder.is_used:
        yield
        return
    with _again():
        for name in _saved_by(type(node)):
            with suppress(RuntimeError):  # it was freed: what asks for it says so
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
    """What autograd keeps in the place of a tensor that it saves."""

    def unpack(self) -> Tensor:
        """The tensor, as often as it is asked for."""


_make: Any = getattr(torch._C._autograd, "_make_saved_tensor", None)
_OURS = "_backpack_saved"  # on what a checkpoint knows of one run: which of its tensors are ours
_INNER = "_backpack_inner"  # on the same: that checkpoints in it were made one graph with it


class _Hook(NamedTuple):
    """The hook on saved tensors that is on top.

    Attributes:
        frame: What a checkpoint knows of one run; ``None`` for hooks of others.
        task: For which backward pass it computes again; ``None`` in the forward pass.
        is_foreign: It belongs to no checkpoint, but to somebody who packs by value, or torch does
            not tell.
    """

    frame: Any
    task: Any
    is_foreign: bool

    @property
    def gives_again(self) -> bool:
        """Whether what it takes is given to us, and to autograd once more."""
        return not self.is_foreign and getattr(torch_checkpoint, "_Holder", None) is _Holder


# Asked for every call that is recorded.
_top_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saving_hook() -> _Hook | None:
    """The hook that autograd's saved tensors go through; ``None`` for none."""
    try:
        hooks = _top_hooks(False)
    except TypeError:  # it is not public, and its arguments have changed before
        return _Hook(None, None, True)
    if hooks is None:
        return None
    pack = inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", "") != torch_checkpoint.__name__:
        return _Hook(None, None, True)
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    known = {name: cell.cell_contents for name, cell in cells}
    if "target_frame_ref" in known:
        return _Hook(known["target_frame_ref"](), known.get("gid"), False)
    return _Hook(known.get("frame"), None, False)


def is_computed_again() -> bool:
    """Whether a checkpoint runs its function once more, and expects what it saved before."""
    return getattr(saving_hook(), "task", None) is not None


def save(tensor: Tensor) -> SavedTensor | None:
    """Save a tensor as autograd does, through the hooks of the moment; ``None`` where it cannot.

    A checkpoint tells what it computes again from the order in which tensors are saved. So then,
    those that were ours in its forward pass are, and no others.
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
    """A re-entrant checkpoint; in an extended model, one whose graph is part of the model's.

    The pass of a re-entrant one is a graph of its own, through which nothing but a gradient goes.
    """

    model_runs: Callable[[], bool] = staticmethod(lambda: False)

    @classmethod
    def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """As ``torch.utils.checkpoint.checkpoint`` calls it."""
        if cls is not CheckpointFunction:  # a class that was made of this one
            return super().apply(function, preserve_rng_state, *args)
        # What no gradient arrives at gets none here, and would from the other kind.
        wants = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if wants and torch.is_grad_enabled() and cls._is_inside():
            return torch_checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )
        return _Reentrant.apply(function, preserve_rng_state, *args)  # whose nodes are known

    @classmethod
    def _is_inside(cls) -> bool:
        """Whether an extended model runs; where it is computed again, whether it did then."""
        hook = saving_hook()
        frame = None if hook is None else hook.frame
        if hook is not None and hook.task is not None:
            return hasattr(frame, _INNER)
        if cls.model_runs() and frame is not None:
            setattr(frame, _INNER, True)
        return cls.model_runs()


def unpack(saved: SavedTensor) -> Tensor:
    """Ask for a tensor, and maybe once more.

    Hooks, and what checkpoints compute again, run outside of transforms of ``torch.func``.
    """
    with (
        _again(),
        nullcontext() if peek_transform() is None else temporarily_clear_interpreter_stack(),
    ):
        return saved.unpack()
