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

Uses = tuple[Tensor, list[Reading]]  # a parameter, and a reading for each of its uses


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
        self.complete(group, view, [(own.parameter, [reading]) for own, reading in pairs])

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

    def complete(self, group: Group, view: View, complete: list[Uses]) -> None:
        """Have all extensions of a group read parameters, each with all of its uses."""
        module, known = view.call.module, self.survey.uses
        way = "autodiff" if any(known[id(p)].unruled for p, _ in complete) else "rule"
        if not view.is_reached:
            self.unreached.update(id(parameter) for parameter, _ in complete)
        try:
            for extension in group.extensions:
                if (watch := group.watch) is None:
                    values = self._read(extension, view, complete)
                else:
                    kind = type(extension)
                    values = watch(module, kind, way, self._read, extension, view, complete)
                for (parameter, _), value in zip(complete, values, strict=True):
                    if value is not None:
                        value = unshared(extension.as_stored(value, parameter), view, self._memory)
                    self.store(extension, parameter, value)
        except Exception as error:
            place(error, view, extension)
            raise

    def _read(self, extension: Extension, view: View, complete: list[Uses]) -> list[Any]:
        """An extension's value for each parameter; ``None`` where it leaves the parameter out."""
        values: list[Any] = []
        for parameter, uses in complete:
            value = None
            try:
                use = self.survey.uses[id(parameter)]
                is_left_out = use.unruled and extension.fail_mode in ("warning", "silent")
                if use.is_wanted and not is_left_out:
                    shown = uses[0] if len(uses) == 1 else joined(uses)
                    shown = shown.lasting() if extension.is_deferred else shown
                    shown.parameter = parameter
                    value = ask(view, extension, "read", shown)
                    if value is None:
                        raise errors.ShapeError(f"{type(extension).__name__}.read returned None.")
            except errors.UnsupportedError as error:
                if not tolerates(extension, view, uses[-1].name, error):
                    raise
            values.append(value)
        return values

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


def joined(uses: list[Reading]) -> Any:
    """One reading for all uses of a parameter; they are joined at the first call."""
    if len(uses) > 1:
        whole = uses[0].join(uses[1:])
        Reading.placed_as(whole, uses[-1])
        uses[:] = [whole]
    return uses[0]


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


def tolerates(extension: Extension, view: View, name: str, error: errors.UnsupportedError) -> bool:
    """Whether an extension goes on after an error, as its ``fail_mode`` says."""
    if extension.needs_every_parameter:
        return False
    key = (type(view.call.module), type(extension), name)
    return leaves_out(extension, key, f"{view.path}: {error}")


def leaves_out(extension: Extension, key: tuple[object, ...], text: str) -> bool:
    """Whether an extension leaves a parameter out, as its ``fail_mode`` says; warns if asked to."""
    if extension.fail_mode == "warning":
        errors.warn_once(key, text, errors.BackpackWarning)
    return extension.fail_mode in ("warning", "silent")
