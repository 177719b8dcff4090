"""Who answers for a module in one group of extensions; by default, its layer rule.

A carrier reads off at parameters and sends on to inputs; the traversal does not ask which it is.
One that speaks for a pair (extension, module type) is made by a function in
``extension.carriers``, or in what the hook ``backpack_pair_overrides`` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor

from backpack_core.graph.parameters import Trained
from backpack_core.record.view import View

if TYPE_CHECKING:
    from backpack_core.contract.extension import Extension
    from backpack_core.contract.propagator import Propagator


@dataclass(slots=True)
class Found:
    """What there is at a parameter.

    Attributes:
        name: What the module calls it.
        parameter: The parameter.
        value: What an extension reads, or what is stored.
    """

    name: str
    parameter: Tensor
    value: Any


class Carrier(ABC):
    """What a call does with a group's quantity.

    Class attributes:
        gives_values: What is found at parameters is stored as it is; else extensions read it.

    Attributes:
        speaker: Whose code that is, for messages.

    To write:
        ``starts(view)``, ``arrive(view, waiting)``, ``find(view, trained, quantity)`` and
        ``send(view, quantity)``.
    """

    gives_values: ClassVar[bool] = False
    speaker: object

    @abstractmethod
    def starts(self, view: View) -> bool:
        """Whether nothing need arrive at the call: sending is what begins there."""

    @abstractmethod
    def arrive(self, view: View, waiting: Any) -> Any:
        """The quantity at the call's output, from what was sent there; ``None`` for nothing."""

    @abstractmethod
    def find(self, view: View, trained: Iterable[Trained], quantity: Any) -> Iterable[Found]:
        """What there is at every parameter."""

    @abstractmethod
    def send(self, view: View, quantity: Any) -> dict[int, Any]:
        """What goes on to the inputs, by position."""


# Called with the extension and what travels for it, which may be a propagator like its own.
CarrierOf: TypeAlias = "Callable[[Extension, Propagator], Carrier]"
