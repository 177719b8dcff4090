"""Which extended model a module is part of, and its runs on each thread.

The model's input tells how many samples there are; what a part receives may have any length.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Final

from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core import _torch
from backpack_core._torch import Node, running_calls
from backpack_core.errors import UsageError
from backpack_core.record.run import NO_RUN, NO_RUN_OF_RANKS, Run, run_of
from backpack_core.record.structure import placed_tensors

OWNER_ATTRIBUTE: Final = "_backpack_owner"
PATH_ATTRIBUTE: Final = "_backpack_path"  # where a part lies in the model


# The runs of extended models by thread, outermost first.
_running: dict[int, list[tuple[Owner, Run]]] = {}
_RETURNED: Final = "backpack_returned"
# Extended models that somebody holds.
MODELS: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()
# Tensors that stood in the place of parameters, by ``id``, with the module that had each.
SUBSTITUTES: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Module], str]] = {}


def _still_running() -> list[tuple[Owner, Run]]:
    """The runs on this thread; drops those that ended by an exception that no hook saw."""
    known = _running.get(get_ident(), [])
    while known and not running_calls(known[-1][0].module):
        known.pop()
    return known


def model_runs() -> bool:
    """Whether an extended model runs on this thread, and is recorded."""
    return any(run is not NO_RUN for _, run in _still_running())


def is_returned(node: Node, number: int) -> bool:
    """Whether a tensor is what an extended model made of what came from outside."""
    noted: Any = node.metadata
    return number in noted.get(_RETURNED, ())


class Owner:
    """An extended model, as its parts know it: without keeping it alive.

    Attributes:
        axes: The declared axis of the samples by path of a part, which holds for all inside of it.
    """

    __slots__ = ("__weakref__", "_module", "axes")

    def __init__(self, module: Module | None, axes: Mapping[str, int] | None = None) -> None:
        self.axes = axes or {}
        self._module = None if module is None else weakref.ref(module)
        if module is not None:
            MODELS[id(module)] = module

    def begin(self, received: Sequence[Any] | None) -> None:
        """Note that the model begins to run on this thread.

        Args:
            received: The arguments of the model; ``None`` if nothing is recorded.

        Raises:
            UsageError: None of them has the axis on which samples are said to lie.
        """
        run = NO_RUN
        if received is not None:
            placed, axis = [*placed_tensors(received)], self.axes.get("", 0)
            run = run_of(placed, axis, _torch.is_distributed(self.module))
            if axis and placed and not run.sizes:
                raise UsageError(
                    f"extend(..., batch_axis={axis}) was said, and the model received no tensor "
                    f"with such an axis: {', '.join(str(list(t.shape)) for _, t in placed)}."
                )
            self._note_handed()
        _running.setdefault(get_ident(), _still_running()).append((self, run))

    def _note_handed(self) -> None:
        """Note what stands in the place of parameters, as ``functional_call`` puts it there.

        A part that is never called says nothing of it: a list of parameters, a tied weight.
        """
        module = self.module
        parts = [] if module is None else [module]
        for part in parts:  # it grows: parts may have come since the last run
            if part._modules:
                parts += [inner for inner in part._modules.values() if inner is not None]
            own: Mapping[str, Tensor | None] = part._parameters
            for name, tensor in own.items():
                if tensor is not None and not isinstance(tensor, Parameter):
                    key = id(tensor)
                    forget = partial(_forget, key)
                    SUBSTITUTES[key] = weakref.ref(tensor, forget), weakref.ref(part), name

    def end(self, results: Iterable[Tensor] = ()) -> None:
        """Note that the run has ended, or was left by an exception.

        Args:
            results: What the model returned.
        """
        thread = get_ident()
        known = _running.get(thread, [])
        places = [i for i, (owner, _) in enumerate(known) if owner is self]
        if places:
            run = known[places[-1]][1]
            del known[places[-1] :]
            is_outermost = run.sizes and not (run.has_computed_input or self.axes)
            for tensor in results if is_outermost else ():
                node: Any = tensor.grad_fn
                if node is not None:
                    node.metadata.setdefault(_RETURNED, set()).add(tensor.output_nr)
        if not known:
            _running.pop(thread, None)

    @property
    def module(self) -> Module | None:
        """The model; ``None`` once it is gone."""
        return None if self._module is None else self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        """In a copy of the whole model, that copy; in a copy of a part, an owner of nothing."""
        return Owner(memo.get(id(self.module)), self.axes)

    def __reduce__(self) -> tuple[Any, ...]:
        """A restored module belongs to no model until it is extended again."""
        return Owner, (None,)


def owner_of(module: Module) -> Module:
    """The extended model that a module is part of; the module itself if that is unknown."""
    owner = module.__dict__.get(OWNER_ATTRIBUTE)
    found = None if owner is None else owner.module
    return module if found is None else found


def owners_of(modules: Iterable[Module]) -> list[Module]:
    """The extended models that some modules are part of, each once."""
    by_owner = {m.__dict__.get(OWNER_ATTRIBUTE) or id(m): m for m in modules}
    return list({id(model): model for model in map(owner_of, by_owner.values())}.values())


def _forget(key: int, reference: weakref.ref[Tensor]) -> None:
    if key in SUBSTITUTES and SUBSTITUTES[key][0] is reference:
        del SUBSTITUTES[key]


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or stood in the place of one when a model ran."""
    return isinstance(tensor, Parameter) or id(tensor) in SUBSTITUTES


def computed_substitutes() -> dict[tuple[Node, int], Tensor]:
    """Results of a computation that stood in the place of parameters, by the output of a node."""
    handed = (reference() for reference, *_ in [*SUBSTITUTES.values()])
    return {(t.grad_fn, t.output_nr): t for t in handed if t is not None and t.grad_fn is not None}


def run_of_model(module: Module, thread: int) -> Run:
    """What the extended model of a part received, if it is running on this thread."""
    known = _running.get(thread)
    if known:
        mine: Owner | None = module.__dict__.get(OWNER_ATTRIBUTE)
        for owner, run in reversed(known):
            if owner is mine:
                return run
    return NO_RUN_OF_RANKS if _torch.is_distributed() else NO_RUN
