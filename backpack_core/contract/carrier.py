"""What answers for a module in one group of extensions; by default, its layer rule.

The traversal asks every carrier the same questions. So an extension may replace the layer rule for
one module type, and nothing else changes. Such carriers are made by a function in
``extension.carriers``, or in what the hook ``backpack_pair_overrides`` returns.
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
    """The result that a carrier has for a parameter.

    Attributes:
        name: Its name in the module.
        parameter: The parameter.
        value: The result.
    """

    name: str
    parameter: Tensor
    value: Any


class Carrier(ABC):
    """What answers for a call: what arrives, what there is at parameters, what goes on.

    Class attributes:
        gives_values: Whether it finds results, which are stored as they are; else extensions read
            what it finds.

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
        """Whether sending begins at this call, so that nothing need arrive."""

    @abstractmethod
    def arrive(self, view: View, waiting: Any) -> Any:
        """The quantity at the output, from what was sent there; ``None`` if there is none."""

    @abstractmethod
    def find(self, view: View, trained: Sequence[Trained], quantity: Any) -> Iterable[Any]:
        """A :class:`ParameterResult` for each parameter; else a reading for each, in order."""

    @abstractmethod
    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """The quantities at the inputs of the call, by position."""


# Makes a carrier, from the extension and the propagator that travels for it.
CarrierOf: TypeAlias = "Callable[[Extension, Propagator], Carrier]"
