"""Where readings of a parameter wait for its other uses, and results of chunks for each other.

A parameter that several calls use is read once, at the visit of its last use: squares, norms and
clipped sums need the sum of the products of all uses.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from backpack_core import _torch
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Reading
from backpack_core.engine.active import Context, Group
from backpack_core.engine.sink import Sink
from backpack_core.engine.sink import Uses as AnyUses
from backpack_core.errors import BackpackWarning, InternalError, UnsupportedError, warn_once
from backpack_core.graph import Survey, Trained
from backpack_core.record.call import Call
from backpack_core.record.guards import visible_memory
from backpack_core.record.models import owners_of
from backpack_core.record.view import View
from backpack_operations._torch import will_get_gradient, will_get_to
from backpack_operations.readings import joined
from backpack_products.held import held_by
from backpack_products.recycled import drop, offer, will_store

Uses = tuple[Tensor, list[Reading]]  # a parameter, and a reading for each of its uses
Values = dict[tuple[Extension, int], Any]  # by extension, and id of the parameter


class SharedSink(Sink):
    """Has extensions read a parameter when all of its uses were visited; stores nothing.

    A chunk may reach only some uses of a parameter, so none is the last.
    """

    _pending: dict[tuple[int, int], tuple[Group, View, Uses]]

    def is_last(self, parameter: Tensor, seen: int, uses: int) -> bool:
        """Whether a parameter with several uses has no further use in this pass. Default: no.

        Args:
            parameter: The parameter.
            seen: How many of its uses were visited.
            uses: How many uses it has in the graph.
        """
        return False

    def note(
        self,
        lane: int,
        group: Group,
        view: View,
        trained: Sequence[Trained],
        readings: Iterable[Reading],
    ) -> None:
        """Read each parameter at its last use; before, keep the reading for that, or :meth:`end`.

        See the base class.
        """
        complete: list[Uses] = []
        for (_, parameter, _), reading in zip(trained, readings, strict=True):
            number, uses = id(parameter), [reading]
            count = self.survey.uses[number].count
            if count > 1:
                if (lane, number) in self._pending:
                    *_, (_, before) = self._pending.pop((lane, number))
                    uses = [*before, reading]
                if not self.is_last(parameter, len(uses), count):
                    lasting = [use.lasting() for use in uses]
                    self._pending[lane, number] = group, view, (parameter, lasting)
                    continue
            complete.append((parameter, uses))
        if complete:
            self.complete(group, view, complete)

    def values(
        self, group: Group, extension: Extension, view: View, complete: AnyUses
    ) -> list[Any]:
        """An extension's value for each parameter, for which its time is taken."""
        if (watch := group.watch) is None:
            return super().values(group, extension, view, complete)
        known = self.survey.uses
        way = "autodiff" if any(known[id(p)].unruled for p, _ in complete) else "rule"
        module, kind = view.call.module, type(extension)
        found: list[Any] = watch(
            module, kind, way, super().values, group, extension, view, complete
        )
        return found

    def value(self, extension: Extension, view: View, parameter: Tensor, reading: Any) -> Any:
        """An extension's value for all uses of a parameter; ``None`` if it leaves them out."""
        uses: list[Reading] = reading
        use = self.survey.uses[id(parameter)]
        is_left_out = use.unruled and extension.fail_mode in ("warning", "silent")
        if not use.is_wanted or is_left_out:
            return None
        try:
            return super().value(extension, view, parameter, joined(uses))
        except UnsupportedError as error:
            if not _tolerates(extension, view, uses[-1].name, error):
                raise
            return None


class ChunkSink(SharedSink):
    """Collects the values of one chunk of columns.

    A chunk may reach only some uses of a parameter. They are read when the chunk is through.
    """

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey)
        self._pending = {}
        self._values: Values = {}

    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Collect a value of one parameter."""
        self._values[extension, id(parameter)] = value

    def add_to(self, partial: Values) -> None:
        """Read parameters that wait for further uses; combine all values into ``partial``."""
        for group, view, uses in self._pending.values():
            for reading in uses[1]:
                reading.is_part = True
            self.complete(group, view, [uses])
        self._pending.clear()
        for key, value in self._values.items():
            partial[key] = _combined(partial, key, value)


class GraphSink(SharedSink):
    """Stores results as attributes of the parameters, in the memory of those that they replace.

    Attributes:
        clears: Whether the pass removes results of earlier passes.
        partial: Values of earlier chunks of columns.
    """

    clears = True

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey)
        self._pending = {}
        self.partial: Values = {}
        self._owners: dict[int, object] = {}
        self._outside: Mapping[int, object] = {}
        self._token = object()  # stands for this sink, to which a reference would be a cycle
        self._missing: tuple[int, Mapping[int, int]] = 0, {}
        self._in_part: set[int] = set()  # ``id`` of parameters with uses that are not reached

    def join(self, outer: GraphSink, is_part: bool) -> None:
        """Take account of the sink of the pass around this one.

        Args:
            outer: That sink.
            is_part: Whether this pass belongs to that one. Otherwise, parameters that the outer one
                has stored results on are left alone.
        """
        if is_part:
            self.deferred, self._owners = outer.deferred, outer._owners
            self.normalisers = outer.normalisers
            self._outside = outer._outside
        else:
            self._outside = outer.new
        self.clears = is_part and outer.clears

    def clear(
        self,
        calls: Iterable[Call],
        context: Context,
        used: Collection[Tensor] | None = None,
    ) -> None:
        """Remove the results of earlier passes, and offer their memory to those of this one.

        Args:
            calls: See the base class.
            context: See the base class.
            used: The parameters that the pass uses, if that is known. If the last pass of all was
                like this one, only these have results.
        """
        if not self.clears:
            will_store((), [])
            return
        fields = [extension.savefield for extension in context.extensions]
        models = owners_of(call.module for call in calls)
        are_same, are_known = will_store(models, fields, used)
        if used is None or not are_known:
            used = self.parameters(models)
        if self._owners or self._outside:
            new = self.new
            used = [parameter for parameter in used if id(parameter) not in new]
        # Memory that is offered and not written again would only take space.
        offers = are_same and not context.keeps_results
        offer([parameter.__dict__ for parameter in used], fields, offers)

    def leave(self) -> None:
        """Free the memory that was offered and not written again."""
        drop()

    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Set the attribute, with the values of earlier chunks of columns combined."""
        key = id(parameter)
        value = _combined(self.partial, (extension, key), value) if self.partial else value
        if value is None or key in self._outside:
            return
        if self._owners.setdefault(key, self._token) is not self._token:
            raise UnsupportedError(
                f"A parameter of shape {list(parameter.shape)} is used in a nested backward pass "
                "(of a re-entrant checkpoint, or a function whose backward calls autograd) and "
                f"elsewhere, so '{extension.savefield}' would miss a part. Use "
                "torch.utils.checkpoint(use_reentrant=False); for a solver, differentiate the "
                "steps themselves (odeint, not odeint_adjoint)."
            )
        self.put(extension, parameter, value)

    def is_last(self, parameter: Tensor, seen: int, uses: int) -> bool:
        """Whether autograd has visited all uses that it gets to.

        ``backward(inputs=...)`` gets to all uses of the parameters in ``inputs``. Of another
        parameter it may get to some uses only; such a parameter gets no result.
        """
        if seen == uses:
            self._in_part.discard(id(parameter))
            return True
        if not will_get_gradient(parameter):
            self._in_part.add(id(parameter))
            return False
        return seen + self.look_ahead()[id(parameter)] == uses

    def waits_for(self, parameter: Tensor) -> list[int]:
        """The lanes in which a parameter waits for uses; none if autograd reaches it in part."""
        if id(parameter) in self._in_part:
            return []
        return [lane for lane, number in self._pending if number == id(parameter)]

    def end(self, view: View, parameter: Tensor) -> None:
        """Read a parameter that still waits: an operation may send nothing to its last use.

        Args:
            view: The view of the last use; calls that were visited before have been freed.
            parameter: The parameter.
        """
        for lane in self.waits_for(parameter):
            group, _, uses = self._pending.pop((lane, id(parameter)))
            held = (tensor for use in uses[1] for tensor, _ in held_by(use))
            visible_memory(view).update(_torch.memories_of(held))
            self.complete(group, view, [uses])

    def see_end(self) -> None:
        """Raise an error if a reading is left, for a parameter with uses that are all reached.

        Raises:
            InternalError: A further use was expected and not visited.
        """
        left = {number for _, number in (*self._pending, *self.partial)} - self._in_part
        if left:
            use = self.survey.uses[min(left)]
            raise InternalError(
                f"What was found at {use.name!r} of {use.call.path} waits for another use, which "
                "the backward pass did not get to."
            )

    def look_ahead(self) -> Mapping[int, int]:
        """How many uses of each parameter autograd will not get to, by ``id``."""
        survey = self.survey
        if self._missing[0] != len(survey.sites):
            sites = survey.sites.values()
            calls = [s.call for s in sites if not (s.call.is_released or will_get_to(s.edge.node))]
            uses = Counter(id(use.parameter) for call in calls for use in survey.trained[call])
            self._missing = len(survey.sites), uses
        return self._missing[1]

    @property
    def new(self) -> Mapping[int, object]:
        """Parameters with results of this pass or of those around it, by ``id``."""
        return ChainMap(self._owners, {**self._outside})

    @property
    def stored(self) -> set[int]:
        """Parameters with results of this pass, by ``id``."""
        return {key for key, owner in self._owners.items() if owner is self._token}


def _combined(partial: Values, key: tuple[Extension, int], value: Any) -> Any:
    """A value combined with that of earlier chunks; ``None`` if either was left out."""
    if key not in partial:
        return value
    before = partial.pop(key)
    return None if before is None or value is None else key[0].combine(before, value)


def _tolerates(extension: Extension, view: View, name: str, error: UnsupportedError) -> bool:
    """Whether an extension goes on after an error, as its ``fail_mode`` says."""
    if extension.needs_every_parameter:
        return False
    key = (type(view.call.module), type(extension), name)
    return leaves_out(extension, key, f"{view.path}: {error}")


def leaves_out(extension: Extension, key: tuple[object, ...], text: str) -> bool:
    """Whether an extension leaves a parameter out, as its ``fail_mode`` says; warns if asked to."""
    if extension.fail_mode == "warning":
        warn_once(key, text, BackpackWarning)
    return extension.fail_mode in ("warning", "silent")
