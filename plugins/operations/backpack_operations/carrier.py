"""A carrier answers for a call in one group of extensions; by default, it asks the layer rule.

The traversal asks every carrier the same questions. So an extension can replace the layer rule for
one type of module, and nothing else changes. The functions that make such carriers come from
``extension.carriers`` or from the hook ``backpack_pair_overrides``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.nn import Module

from backpack_core import errors
from backpack_core._torch import class_of
from backpack_core.engine.active import Group
from backpack_core.graph import Trained
from backpack_core.record.view import View
from backpack_operations.survey import GraphSurvey
from backpack_products.overrides import override


class ParameterResult(NamedTuple):
    """The result that a carrier computed for a parameter.

    Attributes:
        name: The parameter's name in its module.
        parameter: The parameter.
        value: The result.
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
        speaker: The object whose code this is, for messages.

    To write:
        ``starts(view)``, ``arrive(view, waiting)``, ``find(view, trained, quantity)`` and
        ``send(view, quantity)``.
    """

    gives_values: ClassVar[bool] = False
    speaker: object

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


def carrier_of(group: Group, module: Module) -> Carrier | None:
    """The carrier of a group with overrides at a module; ``None`` if the layer rule answers."""
    extension = group.extensions[0]
    found = override(extension, module)
    made: Carrier | None = None if found is None else found(extension, group.propagator)
    return made


def values_of(
    carrier: Carrier, survey: GraphSurvey, view: View, trained: Sequence[Trained], quantity: Any
) -> Iterator[ParameterResult]:
    """The results of a carrier that gives values instead of readings.

    Raises:
        UnsupportedError: A parameter has other uses, which such a value would miss.
    """
    for found in carrier.find(view, (*trained, *survey.freed.get(view.call, ())), quantity):
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
