"""Runs the graph extensions of one backward pass, which read the loss as a whole.

They see every visit, and get the graph when autograd is through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from reprlib import repr as abridged
from typing import Any

from torch import Tensor

from backpack_core.contract.extension import Extension
from backpack_core.contract.graph_extension import GraphExtension, GraphReading, LossGraph
from backpack_core.engine.groups import Watch
from backpack_core.engine.location import place, place_between
from backpack_core.errors import PluginCodeError, UsageError
from backpack_core.graph.parameters import complex_parameter
from backpack_core.graph.paths import nonlinear
from backpack_core.graph.survey import Survey
from backpack_core.record.view import View


class GraphPass:
    """The readings of all graph extensions in one backward pass."""

    def __init__(
        self,
        extensions: tuple[GraphExtension, ...],
        roots: tuple[Any, ...],
        gradients: tuple[Tensor | None, ...] = (),
    ) -> None:
        """Begin.

        Args:
            extensions: The extensions.
            roots: What ``backward()`` was called on; none if that was not seen.
            gradients: What came in at each of them.
        """
        self._readings = [(extension, _begun(extension)) for extension in extensions]
        self._roots = roots
        self._gradients = gradients or (None,) * len(roots)
        if extensions and not roots:
            raise UsageError(
                f"{type(extensions[0]).__name__} differentiates the loss as a whole, and the call "
                "of backward() was not seen. Call loss.backward(), torch.autograd.backward or "
                "torch.autograd.grad inside the block, on the thread that entered it, and not "
                "inside of another backward pass."
            )

    def observe(self, view: View) -> None:
        """Show a visit to every reading."""
        for extension, reading in self._readings:
            try:
                reading.observe(view)
            except Exception as error:
                place(error, view, extension)
                raise

    def results(
        self, survey: Survey, watch: Watch | None
    ) -> Iterator[tuple[Extension, Mapping[Tensor, Any]]]:
        """The results by extension and parameter."""
        parameters = _parameters(survey) if self._readings else ()
        through = partial(nonlinear, survey)
        graph = LossGraph(
            self._roots, self._gradients, parameters, through, is_measured=survey.is_measured
        )
        for extension, reading in self._readings:
            try:
                if watch is None:
                    values = reading.results(graph)
                else:
                    values = watch(None, type(extension), "graph", reading.results, graph)
                see_values(values, f"{type(extension).__name__}.results")
            except Exception as error:
                place_between(error, survey, extension)
                raise
            yield extension, values


def see_values(values: Any, who: str) -> None:
    """Raise unless these are values by parameter.

    Raises:
        PluginCodeError: They are something else.
    """
    is_mapping = isinstance(values, Mapping)
    if not is_mapping or any(not isinstance(p, Tensor) or v is None for p, v in values.items()):
        raise PluginCodeError(
            f"{who} has to return a mapping from parameters to values. Got {abridged(values)}."
        )


def _begun(extension: GraphExtension) -> GraphReading:
    reading: object = extension.begin()
    if not isinstance(reading, GraphReading):
        raise PluginCodeError(
            f"{type(extension).__name__}.begin has to return a GraphReading. Got {reading!r:.80}."
        )
    return reading


def _parameters(survey: Survey) -> tuple[Tensor, ...]:
    """The parameters that calls use, and those of extended models that functions use."""
    found = {n: use.parameter for n, use in survey.uses.items() if use.count}
    for parameter, *_ in survey.bare_of_models():
        if parameter.is_complex():
            raise complex_parameter(f"of shape {list(parameter.shape)}")
        found[id(parameter)] = parameter
    return tuple(found.values())
