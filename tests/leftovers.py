"""What a pass must not leave behind, whatever became of it."""

from __future__ import annotations

import gc
import re
import weakref
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules import module

from backpack_core.engine.active import stacks
from backpack_core.engine.backward import BackwardPass
from backpack_core.record.call import Call
from backpack_core.record.switch import is_disabled
from backpack_products.tuning import memory_budget

State = dict[str, int]

_ENGINE = torch.autograd._engine_run_backward
# With the options of hooks, which torch takes for hooks when it compiles.
_OF_ALL_MODULES = [
    table for name, table in vars(module).items() if re.match("_global_.*hooks", name)
]

_EACH = 100  # searches: one that looks at everything takes half a second
_settlements = count()

_passes: weakref.WeakSet[BackwardPass] = weakref.WeakSet()
_calls: weakref.WeakSet[Call] = weakref.WeakSet()


def _noted(known: weakref.WeakSet[Any], kind: type, *args: Any, **kwargs: Any) -> Any:
    found = object.__new__(kind)
    known.add(found)
    return found


BackwardPass.__new__ = partial(_noted, _passes)  # type: ignore[method-assign]
Call.__new__ = partial(_noted, _calls)  # type: ignore[method-assign]


def live_calls() -> int:
    """The number of calls alive: zero once every graph is freed."""
    return len(_calls)


def state() -> State:
    """What is there now, by name."""
    return {
        "calls alive": live_calls(),
        "passes alive": len(_passes),
        "contexts entered": len(stacks),
        "recording off": int(is_disabled()),
        "function modes entered": torch._C._len_torch_function_stack(),
        "entries of autograd taken": int(torch.autograd._engine_run_backward is not _ENGINE),
        "hooks of all modules": sum(map(len, _OF_ALL_MODULES)),
        "bytes of memory budget": memory_budget(),
    }


def left_behind(before: State) -> dict[str, tuple[int, int]]:
    """What is not as it was: numbers before and now, by name.

    Exceptions hold frames in cycles, so garbage is collected; but only if something is left, and
    first where young objects are. And after one, autograd keeps the nodes it did not get to, until
    the next pass of the thread.

    What survives a search among old objects is frozen: else each one walks all imports, and all
    that earlier tests keep. What is still left after it is looked for there, too.
    """
    if not _changed(before):
        return {}
    torch.zeros((), requires_grad=True).neg().backward()
    young = partial(gc.collect, 0), partial(_cut_circles, 1), partial(gc.collect, 1)
    for step in (*young, _search, gc.unfreeze, _search):
        if not _changed(before):
            return {}
        step()
    return _changed(before)


def _search() -> None:
    _cut_circles(2)
    settle()


def settle() -> None:
    """Collect garbage; later collections do not look at what is alive now, but for a few of them.

    Those few free what has become garbage since it was frozen.
    """
    if next(_settlements) % _EACH == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def _cut_circles(generation: int) -> None:
    """Drop results whose graph holds the parameter that they are stored on, as was asked for."""
    freed: list[Any] = []  # when the parameters are not looked at any more
    for thing in gc.get_objects(generation):
        is_parameter = issubclass(type(thing), Tensor) and isinstance(thing, Parameter)
        if is_parameter and any(map(_has_graph, (thing.grad, *vars(thing).values()))):
            freed += [thing, thing.grad, *vars(thing).values()]
            thing.grad = None
            vars(thing).clear()


def _has_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    # A block that multiplies, or a spectrum that makes eigenvectors, keeps what it needs.
    return value is not None and not isinstance(value, list)


def _changed(before: State) -> dict[str, tuple[int, int]]:
    # Fewer calls than before are no fault: the garbage of an earlier test went.
    counted = {"calls alive", "passes alive"}
    return {
        name: (before[name], now)
        for name, now in state().items()
        if now > before[name] or (now != before[name] and name not in counted)
    }
