"""Where readings of a parameter wait for its other uses, and where results are stored.

Nothing may be read before the last use: the products of all uses are added before they are squared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from backpack_core import _torch
from backpack_core.contract.carrier import Found
from backpack_core.contract.extension import Extension
from backpack_core.contract.product import Reading
from backpack_core.engine.carriers import allows_fallback, tolerates
from backpack_core.engine.gradient import PlainGradient
from backpack_core.engine.groups import Group
from backpack_core.engine.location import place, place_between
from backpack_core.errors import ShapeError, UnsupportedError
from backpack_core.graph import nodes
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Site
from backpack_core.record.untouched import ask, owned

Values = dict[tuple[Extension, int], Any]  # by extension, and id of the parameter


class Sink(ABC):
    """Has extensions read off a parameter when all of its uses were visited.

    Attributes:
        survey: What is known about the graph.
        plain: What is done where the plain gradient is a sum of products, if anything is.
    """

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.plain: PlainGradient | None = None
        self._pending: dict[tuple[int, int], tuple[Group, list[Found]]] = {}

    @abstractmethod
    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Take the value an extension computed for a parameter."""

    def is_last(self, parameter: Tensor, seen: int, uses: int) -> bool:
        """Whether no other use of a parameter that has several is coming; default: nobody knows.

        Args:
            parameter: The parameter.
            seen: How many of its uses were visited.
            uses: How many there are.
        """
        return False

    def note(self, lane: int, group: Group, new: Found) -> None:
        """Read, if this is the last use of the parameter; else wait for the others."""
        number = id(new.parameter)
        uses = self.survey.uses[number].count
        if uses == 1:
            self._complete(group, [new])
            return
        # The sum over uses comes before anything that is not linear in them.
        _, found = self._pending.pop((lane, number), (group, []))
        for use in found:  # only the last is where it is read
            new.is_covered, use.view = new.is_covered and use.is_covered, None
        found.append(new)
        if self.is_last(new.parameter, len(found), uses):
            self._complete(group, found)
        else:
            for use in found:
                use.value = use.value.lasting()
            self._pending[lane, number] = group, found

    def flush(self) -> None:
        """Read what is still waiting: no other use is coming."""
        for group, found in self._pending.values():
            self._complete(group, found)
        self._pending.clear()

    def _complete(self, group: Group, found: list[Found]) -> None:
        """Let all extensions of a group read off one parameter."""
        last, plain, watch = found[-1], self.plain, group.watch
        view, parameter, module = last.view, last.parameter, last.view.call.module
        needs = None if plain is None else plain.needs(group, parameter)
        if needs is not None:  # for the sum, too, where the plain gradient is made of it
            for use in found:
                use.value.needs = needs
        whole = last.value if len(found) == 1 else None
        way = "rule" if last.is_covered else "autodiff"
        for extension in group.extensions:
            try:
                if not last.is_covered and not allows_fallback(extension, view):
                    continue
                try:
                    whole = join(found) if whole is None else whole
                    shown = whole.lasting() if extension.is_deferred else whole
                    value = watch(module, type(extension), way, ask, view, extension, "read", shown)
                    if value is None:
                        raise ShapeError(f"{type(extension).__name__}.read returned None.")
                except UnsupportedError as error:
                    if not tolerates(extension, view, last.name, error):
                        raise
                    continue
                self.store(extension, parameter, owned(extension.as_stored(value, parameter), view))
            except Exception as error:
                place(error, view, extension)
                raise
        if plain is not None and needs is not None:
            try:
                whole = join(found) if whole is None else whole
                plain.take(parameter, whole, len(found) > 1 or view.is_reached)
            except Exception as error:
                place(error, view, group.first)
                raise


def join(found: list[Found]) -> Any:
    """One reading from those of all uses of a parameter."""
    readings = [use.value for use in found]
    first, *others = readings
    whole = first.join(others)
    Reading.placed_as(whole, readings[-1])  # its roots are those of all
    whole.is_linear = all(reading.is_linear for reading in readings)
    return whole


class ChunkSink(Sink):
    """Keeps the values of one chunk of columns.

    Of a parameter with several uses it may reach some only, which are read at its end.
    """

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey)
        self._values: Values = {}

    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Keep the value until the chunk is through."""
        self._values[extension, id(parameter)] = value

    def add_to(self, partial: Values) -> None:
        """Combine the values with those of earlier chunks."""
        self.flush()
        for key, value in self._values.items():
            before = partial.get(key)
            partial[key] = value if before is None else key[0].combine(before, value)


class FieldSink(Sink):
    """Sets attributes of the parameters.

    Attributes:
        partial: What earlier chunks of columns gave.
        deferred: Values of extensions that finish when the pass is through.
    """

    def __init__(self, survey: Survey, outer: FieldSink | None, is_part: bool) -> None:
        """Begin.

        Args:
            survey: What is known about the graph.
            outer: That of the pass that this one is inside of.
            is_part: Whether it belongs to that; else what that has stored is left alone.
        """
        super().__init__(survey)
        self.partial: Values = {}
        self.deferred: dict[Extension, Any] = outer.deferred if outer and is_part else {}
        self._owners: dict[int, object] = outer._owners if outer and is_part else {}
        self._outside: dict[int, object] = outer._owners if outer and not is_part else {}
        self._token = object()  # a reference to this sink would be a cycle
        self._missing: tuple[int, Counter[int]] = (0, Counter())

    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Set the attribute, with what earlier chunks of columns gave added."""
        key = id(parameter)
        if key in self._outside:
            return
        if self._owners.setdefault(key, self._token) is not self._token:
            raise UnsupportedError(
                f"A parameter of shape {list(parameter.shape)} is used in a backward pass of its "
                "own (of a re-entrant checkpoint, or a function whose backward calls autograd) and "
                f"elsewhere, so '{extension.savefield}' would miss a part. Use "
                "torch.utils.checkpoint(use_reentrant=False)."
            )
        if self.partial:
            before = self.partial.pop((extension, key), None)
            value = value if before is None else extension.combine(before, value)
        if extension.is_deferred:
            self.deferred.setdefault(extension, {})[parameter] = value
        else:
            setattr(parameter, extension.savefield, value)

    def is_last(self, parameter: Tensor, seen: int, uses: int) -> bool:
        """Whether all uses were visited that autograd gets to.

        Those that it leaves out (``backward(inputs=...)``) do not depend on a parameter that it was
        asked for: another output of the same call may be one.
        """
        if seen == uses:
            return True
        is_all = seen + self.look_ahead()[id(parameter)] == uses
        return is_all and _torch.will_get_gradient(parameter)

    def look_ahead(self) -> Counter[int]:
        """How many uses of each parameter autograd does not get to, by ``id``."""
        survey = self.survey
        if self._missing[0] != len(survey.sites):
            sites = survey.sites.values()
            calls = [s.call for s in sites if not (s.call.is_released or _is_reached(s))]
            uses = Counter(id(use.parameter) for call in calls for use in survey.trained[call])
            self._missing = len(survey.sites), uses
        return self._missing[1]

    def finished(self) -> list[tuple[Extension, Mapping[Tensor, Any]]]:
        """What extensions that wait for the end of the pass store."""
        found = []
        for extension, values in self.deferred.items():
            try:
                found.append((extension, extension.finish(values)))
            except Exception as error:
                place_between(error, self.survey, extension)
                raise
        return found

    def refuse_late_uses(self) -> None:
        """Raise if a parameter that was read already turns out to be used once more."""
        survey = self.survey
        read = {key for key, owner in self._owners.items() if owner is self._token}
        known = read & survey.uses.keys()
        if any(survey.uses[key].count > 1 or key in survey.bare for key in known):
            raise UnsupportedError(
                "A second forward pass, or a second branch, shares parameters with the first and "
                "meets it only behind the losses, and the first was through before this one was "
                "seen. Call backward() inside the block on one tensor that both lead to, or on "
                "each loss by itself."
            )


def _is_reached(site: Site) -> bool:
    """Whether autograd gets there, or to the parameter that it stands for."""
    if nodes.is_leaf(site.edge.node):
        return _torch.will_get_gradient(site.edge.node.variable)  # type: ignore[attr-defined]
    return _torch.will_execute(site.edge.node)
