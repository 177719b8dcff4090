"""A carrier answers for a call in one group of extensions; by default, it asks the layer rule.

The traversal asks every carrier the same questions. So an extension can replace the layer rule for
one type of module, and nothing else changes. The functions that make such carriers come from
``extension.carriers`` or from the hook ``backpack_pair_overrides``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from torch import Tensor

from backpack_core.graph.parameters import Trained
from backpack_core.record.view import View

if TYPE_CHECKING:
    from backpack_core.contract.extension import Extension
    from backpack_core.contract.propagator import Propagator


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
        gives_values: Whether :meth:`find` returns results, which are stored as they are. Otherwise
            it returns readings, from which extensions compute results.

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
        """Whether the quantity starts at this call, so that nothing has to arrive."""

    @abstractmethod
    def arrive(self, view: View, waiting: Any) -> Any:
        """The quantity at the output, given what was sent there; ``None`` if there is none."""

    @abstractmethod
    def find(self, view: View, trained: Sequence[Trained], quantity: Any) -> Iterable[Any]:
        """A :class:`ParameterResult`, or a reading, for each of the parameters, in order."""

    @abstractmethod
    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """The quantities at the inputs of the call, by position."""


# Makes a carrier, from the extension and the propagator that travels for it.
CarrierOf: TypeAlias = "Callable[[Extension, Propagator], Carrier]"
