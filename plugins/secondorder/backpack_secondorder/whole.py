"""Extensions that differentiate the graph of the loss as a whole, instead of reading products.

Products with the Hessian, for example, need no samples and exist for every architecture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from backpack_core.contract.bases import base
from backpack_core.contract.extension import Extension, FailMode
from backpack_core.contract.observer import Observer
from backpack_core.contract.propagator import Propagator, Reading
from backpack_core.contract.rules import LayerRule
from backpack_core.engine.backward import BackwardPass
from backpack_core.engine.location import place, place_between
from backpack_core.engine.sink import see_values
from backpack_core.errors import PluginCodeError, UsageError
from backpack_core.graph import Survey
from backpack_core.record.view import View


@dataclass(frozen=True, eq=False)
class LossGraph:
    """The tensors that a backward pass was called on, with their graph.

    Attributes:
        roots: The tensors that ``backward()`` was called on.
        gradients: The gradient that each of them received.
        parameters: The trained parameters of extended modules that they depend on.
        nonlinear: Nodes between calls, with parameters behind, that are not known to be linear.
        is_measured: Whether values may be looked at, as :attr:`View.is_measured` says.
    """

    roots: tuple[Any, ...]
    gradients: tuple[Tensor | None, ...]
    parameters: tuple[Tensor, ...]
    nonlinear: Callable[[], Sequence[Any]]
    is_measured: bool = True


class GraphReading(ABC):
    """The data that a graph extension collects in one backward pass.

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
        """True with ``subsampling``: the chosen samples must be separate."""
        return self.subsampling is not None

    def start(self, rule: Any, view: View) -> Any:
        """Never called: the loss is differentiated as a whole."""
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

    Samples may influence each other, and functions may use parameters. The results differentiate
    the graph of the pass, so it stays alive as long as they do.

    To write:
        ``begin()``: a :class:`GraphReading` for one backward pass.
    """

    keeps_graph = True
    is_whole = True

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
            fail_mode: See :class:`backpack_core.Extension`.
        """
        super().__init__(WholeLoss(subsampling), savefield, fail_mode)

    @abstractmethod
    def begin(self) -> GraphReading:
        """Begin a backward pass."""

    def attend(self, run: BackwardPass) -> Observer:
        """Show the reading every visit, and give it the graph when autograd has finished.

        Raises:
            UsageError: The tensors that ``backward()`` was called on are not known.
            PluginCodeError: The extension begins no reading.
        """
        reading: object = self.begin()
        name = type(self).__name__
        if not isinstance(reading, GraphReading):
            raise PluginCodeError(f"{name}.begin must return a GraphReading. Got {reading!r:.80}.")
        if not run.arguments.roots:
            raise UsageError(
                f"{name} differentiates the loss as a whole, but did not see the call of "
                "backward(). Call loss.backward(), torch.autograd.backward or torch.autograd.grad "
                "inside the block, on the thread that entered it, and not inside another backward "
                "pass."
            )
        return _Attending(self, reading, run.survey)

    def read(self, product: Any) -> Any:
        """Never called: results come from the graph."""
        raise AssertionError("a graph extension reads no products")


class _Attending(Observer):
    """Runs the reading of one extension."""

    needs_autograd = True

    def __init__(self, extension: GraphExtension, reading: GraphReading, survey: Survey) -> None:
        self._extension, self._reading, self._survey = extension, reading, survey

    def after(self, view: View) -> None:
        """Pass a visit to the reading."""
        try:
            self._reading.observe(view)
        except Exception as error:
            place(error, view, self._extension)
            raise

    def results(self, run: BackwardPass) -> Iterator[tuple[Extension, Mapping[Tensor, Any]]]:
        """The results of the reading."""
        kind, watch = type(self._extension), run.context.watch
        roots, gradients = tuple(run.arguments.roots), tuple(run.arguments.gradients)
        parameters = tuple(self._survey.parameters().values())
        is_measured = self._survey.is_measured
        graph = LossGraph(roots, gradients, parameters, run.between.nonlinear, is_measured)
        try:
            if watch is None:
                values = self._reading.results(graph)
            else:
                values = watch(None, kind, "graph", self._reading.results, graph)
            see_values(values, f"{kind.__name__}.results")
        except Exception as error:
            place_between(error, self._survey, self._extension)
            raise
        yield self._extension, values
