"""Which extended model a module is part of, and what that model received when it ran.

The model's input tells how many samples there are; what a part receives may have any length.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from backpack_core import _torch
from backpack_core._torch import Node, has_memory, hold_address, memory_of, running_calls
from backpack_core.errors import UsageError
from backpack_core.record.structure import placed_tensors

OWNER_ATTRIBUTE: Final = "_backpack_owner"
PATH_ATTRIBUTE: Final = "_backpack_path"  # where a part lies in the model


class Layout(NamedTuple):
    """How a tensor that has samples lies in its memory.

    Attributes:
        shape: Its shape.
        strides: Its strides.
        offset: Where it begins.
        axis: The axis of the samples; negative if that is unknown.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    axis: int

    def axis_in(self, tensor: Tensor) -> int | None:
        """Which axis of a tensor in the same memory is that of the samples, as strides tell."""
        if self.axis < 0:
            return None
        length, stride = self.shape[self.axis], self.strides[self.axis]
        ways = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        return next((k for k, way in ways if way == (length, stride)), None)

    def is_in_front(self, tensor: Tensor) -> bool:
        """Whether axis 0 of a tensor in the same memory is that of samples, of some at least."""
        if self.axis < 0 or not tensor.dim():
            return False
        is_along = tensor.stride(0) == self.strides[self.axis]
        return is_along and len(tensor) <= self.shape[self.axis]


def layout_of(tensor: Tensor, axis: int) -> Layout:
    """The layout of a tensor that has samples on an axis."""
    return Layout(tuple(tensor.shape), tensor.stride(), cast(int, tensor.storage_offset()), axis)


class Given(NamedTuple):
    """A tensor that an extended model received.

    Attributes:
        path: The number of the argument, and of the item of a list or dictionary, at each depth.
        shape: Its shape.
        span: Its memory, and the first and last number there; see :func:`span_of`.
        tensor: Returns it, if somebody still holds it.
        dtype: The type of its numbers.
    """

    path: tuple[int, ...]
    shape: tuple[int, ...]
    span: tuple[int, int, int]
    tensor: Callable[[], Tensor | None]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """The length of axis 0; one of a number."""
        return self.shape[0] if self.shape else 1

    @property
    def kind(self) -> tuple[torch.dtype, int]:
        """The type of its numbers, and how many axes it has."""
        return self.dtype, len(self.shape)


class Run(NamedTuple):
    """What an extended model received in one run.

    Attributes:
        sizes: The lengths of axis 0 of its input tensors; one of them is the number of samples.
        memories: How input tensors, and what layers made of them, lie in their memories.
        is_distributed: Whether it runs inside of DistributedDataParallel.
        passed: Objects that keep the memories added by :meth:`pass_on` from being reused.
        is_inner: Whether any of what it received was computed from parameters or by other models.
        rows: Which rows of which memory the first of its input tensors is; see :func:`rows_of`.
        given: Its input tensors.
        axis: Where samples are said to be in them.
    """

    sizes: tuple[int, ...]
    memories: dict[int, Layout]
    is_distributed: bool
    passed: list[object]
    is_inner: bool = False
    rows: tuple[int, range] | None = None
    given: tuple[Given, ...] = ()
    axis: int = 0

    def lists(self, depth: int) -> list[list[Given]]:
        """Tensors whose paths differ at one depth only: those in a list, or in items of one."""
        found = defaultdict[tuple[int, ...], list[Given]](list)
        for given in self.given if len(self.given) > 1 and not self.axis else ():
            if len(given.path) > depth:
                found[given.path[:depth] + given.path[depth + 1 :]].append(given)
        return [several for several in found.values() if len(several) > 1]

    def groups(self, depth: int) -> list[list[Given]]:
        """The same of one kind each: an index beside them in the list is none of them."""
        found = []
        for several in self.lists(depth):
            for kind in dict.fromkeys(given.kind for given in several):
                found.append([given for given in several if given.kind == kind])
        return [group for group in found if len(group) > 1]

    def receives(self, tensors: Iterable[Tensor]) -> int:
        """Whether any tensor shares memory with the model's input: 1, or 2 if samples are first.

        Samples are first if axis 0 has the same stride in both: a transposed view has another.
        """
        found = self._known(tensors)
        return bool(found) + any(layout.is_in_front(t) for t, layout in found)

    def _known(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Layout]]:
        """Those of some tensors that share a memory, with what is known of that."""
        given = [*filter(has_memory, tensors)] if self.memories else ()
        return [(t, self.memories[m]) for t in given if (m := memory_of(t)) in self.memories]

    def pass_on(self, tensors: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Count results without a graph as received, if a layer made them of the model's input.

        A module with a layer rule keeps samples where they are. Others may not: a table of
        positions is made from the input as well.
        """
        axes = [(t, layout.axis_in(t)) for t, layout in self._known(tensors)]
        for tensor, axis in axes:
            for result in results if axis is not None else ():
                lead = slice(0, (axis or 0) + 1)
                # A view shares memory with the input, and is known by it already.
                if result.shape[lead] == tensor.shape[lead] and has_memory(result):
                    self.memories.setdefault(memory_of(result), layout_of(result, axis or 0))
                    self.passed.append(hold_address(result))

    def shown_by(self, tensors: Sequence[Tensor], stands: Iterable[Tensor]) -> Run:
        """The same run for a call whose tensors are replaced by stand-ins with other memory."""
        found = self.receives(tensors)
        given = [t for t in stands if t.dim() and has_memory(t)] if found else ()
        axis = 0 if found > 1 else -1
        return self._replace(memories={memory_of(t): layout_of(t, axis) for t in given})


def span_of(tensor: Tensor) -> tuple[int, int, int]:
    """The memory of a tensor, and the first and last number there that are its own."""
    first, ways = int(tensor.storage_offset()), zip(tensor.shape, tensor.stride(), strict=True)
    return memory_of(tensor), first, first + sum((length - 1) * step for length, step in ways)


def _given(path: tuple[int, ...], tensor: Tensor) -> Given:
    return Given(path, tuple(tensor.shape), span_of(tensor), weakref.ref(tensor), tensor.dtype)


def rows_of(tensor: Tensor) -> tuple[int, range] | None:
    """Which rows a tensor is of the one that it is a view of, as ``x[2:4]``, and of what memory.

    ``None`` if axis 0 is another one there, as of ``x[t]``.
    """
    if not tensor.dim() or not has_memory(tensor):
        return None
    base, memory, count = tensor._base, memory_of(tensor), len(tensor)
    if base is None:
        return memory, range(count)
    if base.dim() < min(2, tensor.dim()):
        return None  # a flat one has no rows
    row = base.stride(0)
    step, rest = divmod(tensor.stride(0), row) if row and row == max(base.stride()) else (0, 1)
    is_single = count == 1 and base.dim() != tensor.dim()
    if rest or not step or (is_single and tensor.stride(0) == base.stride(1)):
        return None
    first = (tensor.storage_offset() - base.storage_offset()) // row
    return memory, range(first, first + count * step, step)


NO_RUN: Final[Run] = Run((), {}, False, [])
NO_RUN_OF_RANKS: Final[Run] = Run((), {}, True, [])
# The runs of extended models by thread, outermost first.
_running: dict[int, list[tuple[Owner, Run]]] = {}
_RETURNED: Final = "backpack_returned"
_models: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()
# Tensors that stood in the place of parameters, by ``id``, with the module that had each.
_handed: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Module], str]] = {}


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
            _models[id(module)] = module

    def begin(self, received: Sequence[Any] | None) -> None:
        """Note that the model begins to run on this thread.

        Args:
            received: The arguments of the model; ``None`` if nothing is recorded.

        Raises:
            UsageError: None of them has the axis on which samples are said to lie.
        """
        run = NO_RUN
        if received is not None:
            placed = [*placed_tensors(received)]
            tensors = [tensor for _, tensor in placed]
            axis, sizes, layouts = self.axes.get("", 0), [], {}
            for tensor in tensors:
                if tensor.dim() > axis and not tensor.is_nested:
                    sizes.append(tensor.shape[axis])
                    if has_memory(tensor):
                        layouts[memory_of(tensor)] = layout_of(tensor, axis)
            if axis and tensors and not sizes:
                raise UsageError(
                    f"extend(..., batch_axis={axis}) was said, and the model received no tensor "
                    f"with such an axis: {', '.join(str(list(t.shape)) for t in tensors)}."
                )
            self._note_handed()
            is_inner = any(tensor.grad_fn is not None for tensor in tensors)
            rows = rows_of(tensors[0]) if tensors and not axis else None
            is_distributed = _torch.is_distributed(self.module)
            given = (
                () if axis else tuple(_given(*place) for place in placed if has_memory(place[1]))
            )
            run = Run(tuple(sizes), layouts, is_distributed, [], is_inner, rows, given)
        _running.setdefault(get_ident(), _still_running()).append((self, run))

    def _note_handed(self) -> None:
        """Note what stands in the place of parameters, as ``functional_call`` puts it there.

        A part that is never called says nothing of it: a list of parameters, a tied weight.
        """
        module = self.module
        parts = [] if module is None else [module]
        for part in parts:  # it grows: parts may have come since the last run
            parts += [inner for inner in part._modules.values() if inner is not None]
            own: Mapping[str, Tensor | None] = part._parameters
            for name, tensor in own.items():
                if tensor is not None and not isinstance(tensor, Parameter):
                    key = id(tensor)
                    forget = partial(_forget, key)
                    _handed[key] = weakref.ref(tensor, forget), weakref.ref(part), name

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
            for tensor in results if run.sizes and not (run.is_inner or self.axes) else ():
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

    def axis_of(self, path: str) -> int:
        """The declared axis of the samples of a part."""
        while self.axes and path and path not in self.axes:
            path = path.rpartition(".")[0]
        return self.axes.get(path, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        """A restored module belongs to no model until it is extended again."""
        return Owner, (None,)


def name_of_parameter(modules: Iterable[Module], parameter: Tensor) -> str | None:
    """The name of a parameter in the extended models that some modules are part of."""
    for model in owners_of(modules):
        for name, own in model.named_parameters():
            if own is parameter:
                return name
    return None


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
    if key in _handed and _handed[key][0] is reference:
        del _handed[key]


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or stood in the place of one when a model ran."""
    return isinstance(tensor, Parameter) or id(tensor) in _handed


def results_handed_over() -> dict[tuple[Node, int], Tensor]:
    """Results of a computation that stood in the place of parameters, by the output of a node."""
    handed = (reference() for reference, *_ in [*_handed.values()])
    return {(t.grad_fn, t.output_nr): t for t in handed if t is not None and t.grad_fn is not None}


def owned_by_models() -> dict[int, tuple[Module, str]]:
    """Parameters of all extended models, by ``id``: the module that owns each, and its name there.

    If no module of a model is called (``F.linear(x, model.weight)``), nothing else connects its
    parameters with it.
    """
    living = (reference() for reference in _models.valuerefs())
    models = [m for m in living if m is not None and OWNER_ATTRIBUTE in m.__dict__]
    modules = (module for model in models for module in model.modules())
    handed = [(key, part(), name) for key, (_, part, name) in [*_handed.items()]]
    return {key: (part, name) for key, part, name in handed if part is not None} | {
        id(own): (module, name)
        for module in modules
        for name, own in module._parameters.items()
        if own is not None
    }


def run_of_model(module: Module, thread: int) -> Run:
    """What the extended model of a part received, if it is running on this thread."""
    mine: Owner | None = module.__dict__.get(OWNER_ATTRIBUTE)
    for owner, run in reversed(_running.get(thread, [])):
        if owner is mine:
            return run
    return NO_RUN_OF_RANKS if _torch.is_distributed() else NO_RUN
