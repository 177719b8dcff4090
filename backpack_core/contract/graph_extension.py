"""Extensions that differentiate the graph of the loss as a whole, instead of reading products.

Products with the Hessian, for example, need no samples, and exist for every architecture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.bases import base
from backpack_core.contract.extension import Extension, FailMode
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.reading import Reading
from backpack_core.contract.rules import LayerRule
from backpack_core.record.view import View


@dataclass(frozen=True, eq=False)
class LossGraph:
    """What a backward pass was called on, with its graph.

    Attributes:
        roots: The tensors that ``backward()`` was called on.
        gradients: The gradient that came in at each of them.
        parameters: The trained parameters of extended modules that they depend on.
        nonlinear: Nodes between calls, with parameters behind, that are not known to be linear.
        is_measured: Whether values may be looked at, as :attr:`View.is_measured` says.
    """

    roots: tuple[Any, ...]
    gradients: tuple[Tensor | None, ...]
    parameters: tuple[Tensor, ...]
    nonlinear: Callable[[], Sequence[Node]]
    is_measured: bool = True


class GraphReading(ABC):
    """What a graph extension gathers in one backward pass.

    To write:
        ``results(graph)``: the value of each parameter. Optional: ``observe(view)``.
    """

    def observe(self, view: View) -> None:  # noqa: B027 - most wait for the end
        """Called at every output of every call, with its gradient."""

    @abstractmethod
    def results(self, graph: LossGraph) -> Mapping[Tensor, Any]:
        """The result for each parameter; called when the backward pass has ended."""


@base
@dataclass(frozen=True)
class WholeLoss(Propagator):
    """The propagator of graph extensions: nothing travels, and samples may mix."""

    travels = False
    keeps_apart = True
    only_at_losses = True
    subsampling: tuple[int, ...] | None = None

    @property
    def per_sample(self) -> bool:  # type: ignore[override]  # not of the class here
        """True with ``subsampling``: the chosen samples have to be separate."""
        return self.subsampling is not None

    def start(self, rule: Any, view: View) -> Any:
        """Never called, as the others: the loss is read as a whole."""
        raise AssertionError("nothing travels")

    def propagate(self, rule: LayerRule, view: View, quantity: Any) -> dict[int, Any]:
        """Never called."""
        raise AssertionError("nothing travels")

    def products(
        self, rule: Any, view: View, names: Sequence[str], quantity: Any
    ) -> Sequence[Reading]:
        """Never called."""
        raise AssertionError("nothing travels")


@base
class GraphExtension(Extension):
    """An extension that exists wherever autograd can differentiate twice.

    Samples may influence each other, and functions may use parameters. The graph of the pass stays
    alive as long as the results, which differentiate it.

    Attributes:
        is_of_losses: Whether the result belongs to the extended losses, so that ``backward()`` has
            to be called on a weighted sum of them; else it belongs to whatever that is called on.

    To write:
        ``begin()``: a :class:`GraphReading` for one backward pass.
    """

    keeps_graph = True
    is_of_losses: bool = False

    def __init__(
        self,
        subsampling: tuple[int, ...] | None = None,
        savefield: str | None = None,
        fail_mode: FailMode = "autodiff",
    ) -> None:
        """Store the settings.

        Args:
            subsampling: Indices of the samples to take; ``None`` for all.
            savefield: Name of the attribute on parameters; default: the class's.
            fail_mode: See :class:`Extension`.
        """
        super().__init__(WholeLoss(subsampling), savefield, fail_mode)

    @abstractmethod
    def begin(self) -> GraphReading:
        """Begin a backward pass."""

    def read(self, product: Any) -> Any:
        """Never called: nothing is read off parameter by parameter."""
        raise AssertionError("a graph extension reads no products")
