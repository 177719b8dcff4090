"""What a step stores: gradients, which run hooks, and fields of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from backpack_capture._torch import gradient_hooks, take_hooks
from backpack_capture.nested import Apart
from backpack_products.recycled import offer, will_store


class _Earlier:
    """A result of an earlier pass, which the pass that is looked at removes or leaves alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_NOTHING: Final = object()


class Results:
    """The results of a step, taken apart: what it returned, gradients, and fields.

    Attributes:
        tensors: All tensors, each once.
        form: Everything else.
        gradients: The parameters that have a gradient, with its place among the tensors.
        fields: The places of results that are fields.
        is_heard: Whether gradients run hooks.
    """

    def __init__(
        self,
        returned: Any,
        parameters: Sequence[Tensor],
        fields: Sequence[str],
        more: Sequence[tuple[Tensor, str]] = (),
    ) -> None:
        """Look at the parameters.

        Args:
            returned: What the step returned.
            parameters: The parameters that may have results.
            fields: The names of these results.
            more: Other attributes of parameters, which ``extension_hook`` has set.

        Raises:
            HoldsCode: A result holds code.
        """
        graded = [p for p in parameters if p.grad is not None]
        # A model that takes no part in a pass keeps its earlier results.
        places = [(p, f) for p in parameters for f in fields]
        own = [(p, f) for p, f in places if not isinstance(p.__dict__.get(f), _Earlier)]
        stored = [(p, f) for p, f in own if f in p.__dict__]
        stored += [(p, name) for p, name in more if name in p.__dict__]
        values = [p.__dict__[field] for p, field in stored]
        self._apart = Apart((returned, [p.grad for p in graded], values))
        self.tensors, self.form = self._apart.tensors, self._apart.form
        numbers = {id(t): number for number, t in enumerate(self.tensors)}
        self.gradients = [(p, numbers[id(p.grad)]) for p in graded]
        self._stored = stored
        self._absent = [(p, f) for p, f in own if f not in p.__dict__]
        self.places = [(id(p), field) for p, field in stored], [id(p) for p in graded]
        self.fields = [numbers[id(v)] for v in values if type(v) is Tensor]
        self.is_heard = False
        only = [type(value) is Tensor for value in (returned, *values)]
        self._of = [numbers[id(v)] for v in (returned, *values)] if all(only) else None

    def hear(self, order: Sequence[Tensor]) -> None:
        """Let gradients run hooks, in an order of parameters."""
        places = {id(parameter): place for place, parameter in enumerate(order)}
        self.gradients.sort(key=lambda pair: places.get(id(pair[0]), -1))
        self.is_heard = bool(order)

    def offer(self) -> None:
        """Offer the memory of the present results to those that replace them."""
        owners: dict[str, list[dict[str, Any]]] = {}
        for parameter, field in self._stored:
            owners.setdefault(field, []).append(parameter.__dict__)
        for field, tables in owners.items():
            offer(tables, (field,))

    def deliver(self, tensors: Sequence[Tensor]) -> Any:
        """Store the same results with other tensors, and return what the step returned."""
        if not self.is_heard:
            for parameter, place in self.gradients:
                _add(parameter, tensors[place])
        returned = self._store(tensors)
        if self.is_heard:  # hooks find the other results
            for parameter, place in self.gradients:
                accumulate(parameter, tensors[place])
        return returned

    def _store(self, tensors: Sequence[Tensor]) -> Any:
        # Tables of attributes are looked up each time: torch.utils.swap_tensors exchanges them.
        for parameter, field in self._absent:
            parameter.__dict__.pop(field, None)
        if self._of is not None:  # the most frequent case: every result is a tensor
            first, *others = self._of
            for (parameter, field), place in zip(self._stored, others, strict=True):
                parameter.__dict__[field] = tensors[place]
            return tensors[first]
        returned, _, values = self._apart.put_together(tensors)
        for (parameter, field), value in zip(self._stored, values, strict=True):
            parameter.__dict__[field] = value
        return returned


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to that of a parameter as autograd does: this runs its hooks."""
    if gradient_hooks(parameter):
        torch.autograd.backward((parameter,), (gradient,))
    else:
        _add(parameter, gradient)


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


def _is_same(gradient: Tensor | None, given: tuple[Tensor | None, int]) -> bool:
    """Whether a gradient was neither replaced nor changed in place."""
    return gradient is given[0] and _version(gradient) == given[1]


class Before:
    """A block that begins without gradients and results, and in which gradients run no hooks.

    Afterwards gradients are added to the earlier ones, and run hooks. Earlier results are back
    where the step has not removed them.

    Attributes:
        order: Parameters with hooks, in the order of their gradients.
        fault: What the step did to gradients before its backward pass; empty if nothing.
    """

    def __init__(
        self, parameters: Sequence[Tensor], fields: Sequence[str], models: Sequence[Module]
    ) -> None:
        self._parameters, self._fields, self._models = parameters, fields, models
        self._before: list[Tensor | None] = []
        self._given = list[tuple[Tensor | None, int]]()
        self._put_back = list[Callable[[], None]]()
        self.order = list[Tensor]()
        self.fault = ""

    def begin(self) -> None:
        """Put gradients and results aside, after the forward pass, which may read them."""
        will_store(self._models, [])
        for parameter in self._parameters:
            table = parameter.__dict__
            table.update({f: _Earlier(table.get(f, _NOTHING)) for f in self._fields})
        self._before = [p.grad for p in self._parameters]
        if not all(map(_is_same, self._before, self._given)):
            self.fault = (
                "it sets or clears .grad, as zero_grad() does, which is not an operation of a "
                "graph: do that before the step"
            )
        for parameter in self._parameters:
            parameter.grad = None
            if parameter.requires_grad and gradient_hooks(parameter):
                self._put_back.append(take_hooks(parameter))
                note = parameter.register_post_accumulate_grad_hook(self.order.append)
                self._put_back.append(note.remove)

    def __enter__(self) -> Before:
        """Restore the earlier gradients."""
        self._given = [(p.grad, _version(p.grad)) for p in self._parameters]
        return self

    def __exit__(self, *error: object) -> None:
        """Add the new gradients, as autograd would have done."""
        for back in reversed(self._put_back):
            back()
        for table in [p.__dict__ for p in self._parameters]:
            for field in self._fields:
                earlier = table.get(field)
                if isinstance(earlier, _Earlier):
                    table[field] = earlier.value
                    if earlier.value is _NOTHING:
                        del table[field]
        found = [p.grad for p in self._parameters]
        for parameter, old in zip(self._parameters, self._before, strict=False):
            parameter.grad = old
        with torch.no_grad():
            for parameter, new in self._in_order(found if self._before else []):
                if new is not None:
                    accumulate(parameter, new)

    def _in_order(self, found: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
        places = {id(parameter): place for place, parameter in enumerate(self.order)}
        pairs = [*zip(self._parameters, found, strict=False)]
        return sorted(pairs, key=lambda pair: places.get(id(pair[0]), -1))
