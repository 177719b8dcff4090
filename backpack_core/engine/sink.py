"""Where extensions read parameters, where results are stored, and what becomes of earlier ones.

A pass removes results from every parameter of the models that take part. So results of an earlier
pass never stand next to new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from reprlib import repr as abridged
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack_core import errors
from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Reading
from backpack_core.contract.rules import Normaliser
from backpack_core.engine.active import Context, Group
from backpack_core.engine.location import place, place_between
from backpack_core.graph import Survey, Trained
from backpack_core.record.call import Call
from backpack_core.record.guards import ask, unshared
from backpack_core.record.models import owners_of
from backpack_core.record.storage import storage
from backpack_core.record.view import View

Uses = Sequence[tuple[Tensor, Any]]  # parameters, each with its reading, as the sink keeps it


class Sink:
    """Has extensions read the parameters of a call, and stores results as their attributes.

    A library derives from it, for parameters that several calls use.

    Attributes:
        survey: What is known about the graph.
        deferred: Values of extensions that finish when the pass is over.
        normalisers: What the visited losses divide by, for these extensions.
        noted: What was stored, in order; ``None`` if nobody asks for it.
        unreached: The ``id`` of each parameter that was read where no gradient arrives.
    """

    noted: list[tuple[Extension, Tensor, Any]] | None = None

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.deferred: dict[Extension, dict[Tensor, Any]] = {}
        self.normalisers: list[Normaliser] = []
        self.unreached: set[int] = set()
        self._memory: set[int] = set()  # of results

    def clear(self, calls: Iterable[Call], context: Context) -> None:
        """Remove the results of earlier passes from the models that take part.

        Args:
            calls: The calls of the pass; their modules tell the models.
            context: What was asked for.
        """
        fields = [extension.savefield for extension in context.extensions]
        for parameter in self.parameters(owners_of(call.module for call in calls)):
            for field in fields:
                parameter.__dict__.pop(field, None)

    def parameters(self, models: Iterable[Module]) -> list[Tensor]:
        """All parameters of some models that may have results, shards among them."""
        shards = self.survey.shards
        shards.update(storage().shards_in(models))
        modules = chain(*(model.modules() for model in models))
        found = chain(*(module._parameters.values() for module in modules), shards.values())
        return [parameter for parameter in found if parameter is not None]

    def leave(self) -> None:
        """The pass is over, however it ended. Default: nothing is to be done."""

    def note(
        self,
        lane: int,
        group: Group,
        view: View,
        trained: Sequence[Trained],
        readings: Iterable[Reading],
    ) -> None:
        """Read parameters at the visit of a call.

        Args:
            lane: The index of the group.
            group: The extensions that read.
            view: The visit.
            trained: The parameters that the visited call uses.
            readings: A reading for each of them.
        """
        pairs = zip(trained, readings, strict=True)
        self.complete(group, view, [(own.parameter, reading) for own, reading in pairs])

    def store(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Take an extension's value for a parameter; ``None`` if it leaves the parameter out."""
        if value is not None:
            self.put(extension, parameter, value)

    def put(self, extension: Extension, parameter: Tensor, value: Any) -> None:
        """Set a value as an attribute of the parameter, or keep it for the end of the pass."""
        if self.noted is not None:
            self.noted.append((extension, parameter, value))
        if extension.is_deferred:
            self.deferred.setdefault(extension, {})[parameter] = value
        else:
            setattr(parameter, extension.savefield, value)

    def see_end(self) -> None:
        """Raise if something was read and is not stored. Default: this cannot happen."""

    def complete(self, group: Group, view: View, complete: Uses) -> None:
        """Have all extensions of a group read parameters, each with all of its uses."""
        if not view.is_reached:
            self.unreached.update(id(parameter) for parameter, _ in complete)
        try:
            for extension in group.extensions:
                values = self.values(group, extension, view, complete)
                for (parameter, _), value in zip(complete, values, strict=True):
                    if value is not None:
                        value = unshared(extension.as_stored(value, parameter), view, self._memory)
                    self.store(extension, parameter, value)
        except Exception as error:
            place(error, view, extension)
            raise

    def values(self, group: Group, extension: Extension, view: View, complete: Uses) -> list[Any]:
        """An extension's value for each parameter; ``None`` where it leaves the parameter out."""
        return [self.value(extension, view, *pair) for pair in complete]

    def value(self, extension: Extension, view: View, parameter: Tensor, reading: Any) -> Any:
        """An extension's value for one parameter."""
        shown = reading.lasting() if extension.is_deferred else reading
        shown.parameter = parameter
        value = ask(view, extension, "read", shown)
        if value is None:
            raise errors.ShapeError(f"{type(extension).__name__}.read returned None.")
        return value

    def finished(self) -> list[tuple[Extension, Mapping[Tensor, Any]]]:
        """The results of deferred extensions, by parameter."""
        found = []
        for extension, values in self.deferred.items():
            try:
                finished = extension.finish(values, self.normalisers)
                see_values(finished, f"{type(extension).__name__}.finish")
                found.append((extension, finished))
            except Exception as error:
                place_between(error, self.survey, extension)
                raise
        return found


def see_values(values: Any, who: str) -> None:
    """Raise unless a plugin returned a mapping from parameters to values.

    Raises:
        PluginCodeError: It returned something else.
    """
    is_mapping = isinstance(values, Mapping)
    if not is_mapping or any(not isinstance(p, Tensor) or v is None for p, v in values.items()):
        raise errors.PluginCodeError(
            f"{who} must return a mapping from parameters to values. Got {abridged(values)}."
        )
