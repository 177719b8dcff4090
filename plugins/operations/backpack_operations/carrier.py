"""A carrier answers for a call in one group of extensions; by default, it asks the layer rule.

The traversal asks every carrier the same questions. So an extension can replace the layer rule for
one type of module, and nothing else changes. The functions that make such carriers come from
``extension.carriers`` or from the hook ``backpack_pair_overrides``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from reprlib import repr as abridged
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from backpack_core import errors
from backpack_core._torch import class_of
from backpack_core.contract.propagator import Reading
from backpack_core.contract.rules import expect
from backpack_core.engine.active import Group
from backpack_core.errors import ShapeError
from backpack_core.graph import Trained
from backpack_core.record.guards import ask, guarded
from backpack_core.record.view import View
from backpack_operations.survey import GraphSurvey
from backpack_products.columns import ApartColumns, Columns
from backpack_products.overrides import override


class ParameterResult(NamedTuple):
    """The result that a carrier computed for a parameter.

    Attributes:
        name: The parameter's name in its module.
        parameter: The parameter.
        value: The result; ``None`` to leave the parameter out.
    """

    name: str
    parameter: Tensor
    value: Any


class Carrier(ABC):
    """Answers for a call: which quantity arrives, what is read at parameters, and what is sent on.

    Class attributes:
        gives_values: Whether :meth:`find` returns results, which are stored unchanged. Otherwise it
            returns readings, from which extensions compute results.

    Attributes:
        speaker: The object whose code this is, for messages. Default: the carrier.

    To write:
        ``starts(view)``, ``arrive(view, waiting)``, ``find(view, trained, quantity)`` and
        ``send(view, quantity)``.
    """

    gives_values: ClassVar[bool] = False
    speaker: object

    def __getattr__(self, name: str) -> Any:
        """The carrier itself as its speaker, if it names none."""
        if name == "speaker":
            return self
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @abstractmethod
    def starts(self, view: View) -> bool:
        """Whether the quantity starts at this call, so that nothing need arrive."""

    @abstractmethod
    def arrive(self, view: View, waiting: Any) -> Any:
        """The quantity at the output, given what was sent there; ``None`` if there is none."""

    @abstractmethod
    def find(self, view: View, trained: Sequence[Trained], quantity: Any) -> Iterable[Any]:
        """A :class:`ParameterResult`, or a reading, for each of the parameters, in order."""

    @abstractmethod
    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """The quantities at the inputs of the call, by position."""


class _Checked(Carrier):
    """A carrier whose answers are checked, as those of rules are."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier, self._who = carrier, type(carrier).__name__
        self.gives_values, self.speaker = carrier.gives_values, carrier.speaker  # type: ignore[misc]

    def starts(self, view: View) -> bool:
        """What the carrier says."""
        return bool(ask(view, self._carrier, "starts", view))

    def arrive(self, view: View, waiting: Any) -> Any:
        """What the carrier says."""
        return ask(view, self._carrier, "arrive", view, waiting)

    def find(self, view: View, trained: Sequence[Trained], quantity: Any) -> list[Any]:
        """What the carrier found, if it belongs to these parameters."""
        with guarded(view, self._carrier, "find", quantity):
            given: Any = self._carrier.find(view, trained, quantity)
            found = [*given] if isinstance(given, Iterable) else [given]
        if self.gives_values:
            are_right = all(isinstance(each, ParameterResult) for each in found)
            wanted = {id(own.parameter) for own in trained}
            are_right = are_right and {id(each.parameter) for each in found} == wanted
            expected = "a ParameterResult for each, with the value None to leave it out"
        else:
            are_right = all(isinstance(each, Reading) for each in found)
            shapes = [own.used.shape for own in trained]
            are_right = are_right and [each.shape for each in found] == shapes
            expected = f"a reading for each, of the shapes {[*map(list, shapes)]}"
        if not are_right:
            names = [own.name for own in trained]
            raise ShapeError(
                f"{self._who}.find returned {abridged(found)} for {names} of {view.path}, "
                f"expected {expected}."
            )
        return found

    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """What the carrier sends to the inputs of the call."""
        found: Any = ask(view, self._carrier, "send", view, quantity)
        count = len(view.stored.inputs)
        if not (isinstance(found, dict) and found.keys() <= {*range(count)}):
            raise ShapeError(
                f"{self._who}.send returned {abridged(found)} at {view.path}, expected a "
                f"dictionary from positions of its {count} inputs to quantities."
            )
        for position, sent in found.items():
            if isinstance(sent, Columns) and not isinstance(sent, ApartColumns):
                for mat in sent.blocks.values():
                    shape = view.inputs[position].shape
                    expect(view, self._carrier, "send returned", mat, shape)
        return found


def carrier_of(group: Group, view: View) -> Carrier | None:
    """The carrier of a group with overrides at a call; ``None`` if the layer rule answers.

    Raises:
        PluginError: What was made is not a carrier.
    """
    extension = group.extensions[0]
    found = override(extension, view.call.module)
    made: Carrier | None = None if found is None else found(extension, group.propagator)
    if made is None:
        return None
    if not isinstance(made, Carrier):
        raise errors.PluginError(
            f"What stands in for the layer rule of {type(extension).__name__} at {view.path} "
            f"made {made!r:.80}, expected a Carrier, or None for the rule."
        )
    return _Checked(made) if view.is_checked else made


def values_of(
    carrier: Carrier, survey: GraphSurvey, view: View, trained: Sequence[Trained], quantity: Any
) -> Iterator[ParameterResult]:
    """The results of a carrier that gives values instead of readings.

    Raises:
        UnsupportedError: A parameter has other uses, which such a value would miss.
    """
    for found in carrier.find(view, (*trained, *survey.freed.get(view.call, ())), quantity):
        if found.value is None:
            continue
        number = id(found.parameter)
        use, is_computed = survey.uses[number], found.name in view.stored.computed
        is_shared = (use.unruled or use.count) > 1
        if is_computed or is_shared or number in (survey.outside if use.unruled else survey.bare):
            what = "computed from others (parametrized)" if is_computed else "used more than once"
            raise errors.UnsupportedError(
                f"The parameter {found.name!r} of {view.path} is {what}, which a carrier for "
                f"{class_of(view.call.module).__name__} cannot account for. Write a layer rule "
                "instead, or leave the carrier out."
            )
        yield found
