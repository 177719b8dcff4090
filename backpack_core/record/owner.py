"""Extended models: which one a module is part of, and their forward passes on each thread.

The input of the extended model tells how many samples there are. A module inside may receive
tensors of any length, so its call refers to the run of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any, Final

from torch import Tensor
from torch.nn import Module

from backpack_core import _torch
from backpack_core._torch import running_calls
from backpack_core.record.nested import placed_tensors
from backpack_core.record.run import NO_RUN, NO_RUN_OF_RANKS, Run, RunOf

OWNER_ATTRIBUTE: Final = "_backpack_owner"
PATH_ATTRIBUTE: Final = "_backpack_path"  # the path of a submodule in its model

# The runs of extended models by thread, outermost first.
_running: dict[int, list[tuple[Owner, Run]]] = {}
# The extended models that are alive, by ``id``.
MODELS: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()


def _still_running() -> list[tuple[Owner, Run]]:
    """The runs on this thread, without those that an exception ended before their forward hook."""
    runs = _running.get(get_ident(), [])
    while runs and not running_calls(runs[-1][0].module):
        runs.pop()
    return runs


def runs_on(thread: int) -> bool:
    """Whether an extended model may be running on a thread, recorded or not."""
    return thread in _running


def model_runs() -> bool:
    """Whether the forward pass of an extended model runs on this thread and is recorded."""
    return any(run is not NO_RUN for _, run in _still_running())


class Owner:
    """An extended model, to which its submodules refer without keeping it alive.

    Attributes:
        axes: The declared batch axis, by path of a submodule; it holds for everything inside of it.
    """

    __slots__ = ("__weakref__", "_module", "axes")

    def __init__(self, module: Module | None, axes: Mapping[str, int] | None = None) -> None:
        self.axes = axes or {}
        self._module = None if module is None else weakref.ref(module)
        if module is not None:
            MODELS[id(module)] = module

    def begin(self, received: Sequence[Any] | None, run_of: RunOf) -> None:
        """Note that a forward pass of the model begins on this thread.

        Args:
            received: The arguments of the model; ``None`` if nothing is recorded.
            run_of: Makes the run of the model.
        """
        run = NO_RUN
        if received is not None:
            placed, axis = [*placed_tensors(received)], self.axes.get("", 0)
            run = run_of(self.module, placed, axis)
        _running.setdefault(get_ident(), _still_running()).append((self, run))

    def end(self, results: Iterable[Tensor] = ()) -> None:
        """Note that the forward pass has ended, or that an exception has ended it.

        Args:
            results: The tensors that the model returned.
        """
        thread = get_ident()
        runs = _running.get(thread, [])
        indices = [index for index, (owner, _) in enumerate(runs) if owner is self]
        if indices:
            run = runs[indices[-1]][1]
            del runs[indices[-1] :]  # an exception ended the others inside
            if not self.axes:
                run.note_returned(results)
        if not runs:
            _running.pop(thread, None)

    @property
    def module(self) -> Module | None:
        """The model; ``None`` once it is freed."""
        return None if self._module is None else self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        """In a copy of the whole model, the owner is that copy; a copied part has no owner."""
        return Owner(memo.get(id(self.module)), self.axes)

    def __reduce__(self) -> tuple[Any, ...]:
        """A module that was unpickled belongs to no model until it is extended again."""
        return Owner, (None,)


def owner_of(module: Module) -> Module:
    """The extended model that a module is part of; the module itself if there is none."""
    owner = module.__dict__.get(OWNER_ATTRIBUTE)
    model = None if owner is None else owner.module
    return module if model is None else model


def owners_of(modules: Iterable[Module]) -> list[Module]:
    """The distinct extended models that some modules are part of."""
    by_owner = {m.__dict__.get(OWNER_ATTRIBUTE) or id(m): m for m in modules}
    return list({id(model): model for model in map(owner_of, by_owner.values())}.values())


def run_of_model(module: Module, thread: int) -> Run:
    """The run of the extended model that a module is part of, if it is running on this thread."""
    runs = _running.get(thread)
    if runs:
        owner_of_module: Owner | None = module.__dict__.get(OWNER_ATTRIBUTE)
        for owner, run in reversed(runs):
            if owner is owner_of_module:
                return run
    return NO_RUN_OF_RANKS if _torch.is_distributed() else NO_RUN
