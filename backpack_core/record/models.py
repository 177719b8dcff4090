"""Extended models: which one a module is part of, and what each forward pass of it received.

The input of the extended model tells how many samples there are. A module inside may receive
tensors of any length, so its call refers to the run of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor
from torch.nn import Module

from backpack_core import _torch
from backpack_core._torch import running_calls


class Run:
    """What an extended model received in one forward pass.

    This class knows which tensors they are. A library that follows samples through other tensors
    derives from it.

    Attributes:
        sizes: The lengths of the batch axis of its input tensors; one of them is the number of
            samples.
        axis: Their declared batch axis.
        is_distributed: Whether it runs inside of DistributedDataParallel.
        has_computed_input: Whether an input has a graph: parameters or another model computed it.
        inputs: What a library notes about each input tensor.
        memories: What a library notes about each memory that has samples, by its number.
        made: What layers made without a graph, if a library wants it.
    """

    inputs: Sequence[Any] = ()
    memories: Mapping[int, Any] = MappingProxyType({})
    made: Sequence[Any] = ()

    def __init__(
        self,
        tensors: Sequence[Tensor] = (),
        axis: int = 0,
        is_distributed: bool = False,
    ) -> None:
        """Note what the model received.

        Args:
            tensors: The tensors.
            axis: Their declared batch axis.
            is_distributed: Whether the model runs inside of DistributedDataParallel.
        """
        self.axis, self.is_distributed = axis, is_distributed
        with_axis = [t for t in tensors if t.dim() > axis and not t.is_nested]
        self.sizes = tuple([tensor.shape[axis] for tensor in with_axis])
        self.has_computed_input = any(tensor.grad_fn is not None for tensor in tensors)
        self._given = [*map(weakref.ref, tensors)]

    def receives(self, tensors: Iterable[Tensor]) -> int:
        """Whether any tensor has the samples of an input: 1, or 2 if they are on axis 0."""
        given = [reference() for reference in self._given]
        return 2 * any(tensor is other for tensor in tensors for other in given)

    def pass_on(self, tensors: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Treat results without a graph as inputs of the model, if a layer made them from inputs.

        This is for modules with a layer rule, which keep samples in place. Other modules may not: a
        table of positions is made from the input as well.
        """
        self._given += map(weakref.ref, results if self.receives(tensors) else ())

    def note_returned(self, results: Iterable[Tensor]) -> None:
        """Note what the model returned, if its samples are on axis 0. Default: nothing."""


# Makes the run of a model, from the model, what it received, and the declared batch axis.
RunOf = Callable[[Module | None, Sequence[Any], int], Run]
# For calls outside of an extended model; the second, inside of DistributedDataParallel.
NO_RUN: Final = Run()
NO_RUN_OF_RANKS: Final = Run(is_distributed=True)


OWNER_ATTRIBUTE: Final = "_backpack_owner"
PATH_ATTRIBUTE: Final = "_backpack_path"  # the path of a submodule in its model

# The runs of extended models by thread, outermost first.
_running: dict[int, list[tuple[Owner, Run]]] = {}
# The extended models that are alive, by ``id``.
MODELS: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()


def still_running() -> list[tuple[Owner, Run]]:
    """The runs on this thread, without those that an exception ended before their forward hook."""
    runs = _running.get(get_ident(), [])
    while runs and not running_calls(runs[-1][0].module):
        runs.pop()
    return runs


def runs_on(thread: int) -> bool:
    """Whether an extended model may be running on a thread, recorded or not."""
    return thread in _running


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

    def is_of(self, module: Module) -> bool:
        """Whether a module is the model: of an unpickled one, only this module has no path."""
        if self._module is None and not module.__dict__.get(PATH_ATTRIBUTE):
            Owner.__init__(self, module, self.axes)
        return self.module is module

    def begin(self, received: Sequence[Any] | None, run_of: RunOf) -> None:
        """Note that a forward pass of the model begins on this thread.

        Args:
            received: The arguments of the model; ``None`` if nothing is recorded.
            run_of: Makes the run of the model.
        """
        run = NO_RUN
        if received is not None:
            run = run_of(self.module, received, self.axes.get("", 0))
        _running.setdefault(get_ident(), still_running()).append((self, run))

    def end(self, results: Iterable[Tensor] = ()) -> None:
        """Note that the forward pass has ended, or that an exception has ended it.

        Args:
            results: The tensors that the model returned.
        """
        runs = _running.get(get_ident(), [])
        indices = [index for index, (owner, _) in enumerate(runs) if owner is self]
        if indices:
            run = runs[indices[-1]][1]
            del runs[indices[-1] :]  # an exception ended the others inside
            if not self.axes:
                run.note_returned(results)
        if not runs:
            _running.pop(get_ident(), None)

    @property
    def module(self) -> Module | None:
        """The model; ``None`` once it is freed."""
        return None if self._module is None else self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        """In a copy of the whole model, the owner is that copy; a copied part has no owner."""
        return Owner(memo.get(id(self.module)), self.axes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled, it refers to no model before the model's first forward pass."""
        return Owner, (None, self.axes)


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
