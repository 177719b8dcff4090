"""Extensions that read the loss as a whole: derivatives of its graph, not of single samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.column_propagator import OutputGradient
from backpack_core.contract.extension import FailMode, SecondOrderExtension
from backpack_core.graph.nodes import refuse
from backpack_core.record.view import View


@dataclass(frozen=True, eq=False)
class LossGraph:
    """What a backward pass was called on, with its graph.

    Attributes:
        roots: The tensors that ``backward()`` was called on.
        gradients: The gradient that came in at each of them.
        parameters: The trained parameters of extended modules that they depend on.
        nonlinear: Nodes between calls, with parameters behind them, that are not known to be
            linear.
    """

    roots: tuple[Any, ...]
    gradients: tuple[Tensor | None, ...]
    parameters: tuple[Tensor, ...]
    nonlinear: Callable[[], Sequence[Node]]

    def require_linear(self, what: str) -> None:
        """Raise unless all operations between modules are linear.

        Args:
            what: What was asked for.

        Raises:
            BridgeError: One is not known to be.
        """
        for node in self.nonlinear():
            raise refuse(node, f"it is not known to be linear, and {what} needs that")


class GraphReading(ABC):
    """What one such extension gathers in one backward pass.

    To write:
        ``results(graph)``: the value of each parameter. Optional: ``observe(view)``.
    """

    def observe(self, view: View) -> None:  # noqa: B027 - most wait for the end
        """Called at every output of a call, when its gradient is there."""

    @abstractmethod
    def results(self, graph: LossGraph) -> Mapping[Tensor, Any]:
        """The value of each parameter, once the pass is through."""


class WholeLoss(OutputGradient):
    """Nothing travels and samples need not be separate: the graph is read as a whole."""

    only_at_losses = True

    @property
    def per_sample(self) -> bool:  # type: ignore[override]  # not of the class here
        """Those of some samples have to be there."""
        return self.subsampling is not None


class GraphExtension(SecondOrderExtension):
    """An extension that exists wherever autograd can differentiate twice.

    Whatever the architecture is: samples that influence each other, parameters used by plain
    functions. It keeps the graph of the pass alive as long as its results, which differentiate it.

    Attributes:
        is_of_losses: Whether it belongs to the extended losses, so that there has to be nothing but
            a weighted sum of them; else to whatever ``backward()`` is called on.

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
