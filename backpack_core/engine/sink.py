"""Where extensions read parameters, and where results are stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from reprlib import repr as abridged
from typing import Any

from torch import Tensor

from backpack_core.contract.extension import Extension
from backpack_core.contract.loss import Normaliser
from backpack_core.contract.reading import Reading
from backpack_core.engine.carriers import tolerates, wants_unruled
from backpack_core.engine.groups import Group
from backpack_core.engine.location import place, place_between
from backpack_core.errors import PluginCodeError, ShapeError, UnsupportedError
from backpack_core.graph.parameters import Trained
from backpack_core.graph.survey import Survey
from backpack_core.record.guards import guard_of, unshared
from backpack_core.record.view import View

Uses = tuple[Tensor, list[Reading]]  # a parameter, and a reading for each of its uses


class Sink:
    """Has extensions read the parameters of a call, and stores results as their attributes.

    A library derives from it, for parameters that several calls use.

    Attributes:
        survey: What is known about the graph.
        watcher: If an observer has set it: called after a group has read a parameter, with the
            group, the parameter, its reading over all uses, and whether a gradient arrives there.
        new: The ``id`` of each parameter with results of passes under way.
        deferred: Values of extensions that finish when the pass is over.
        normalisers: What the visited losses divide by, for these extensions.
        noted: What was stored, in order; ``None`` if nobody asks for it.
    """

    watcher: Callable[[Group, Tensor, Any, bool], None] | None = None
    noted: list[tuple[Extension, Tensor, Any]] | None = None
    new: Collection[int] = ()

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.deferred: dict[Extension, dict[Tensor, Any]] = {}
        self.normalisers: list[Normaliser] = []
        self._memory: set[int] = set()  # of results

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
        reached = [len(uses) > 1 or view.is_reached for _, uses in complete]
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
            if self.watcher is not None:
                for (parameter, uses), is_reached in zip(complete, reached, strict=True):
                    self.watcher(group, parameter, joined(uses), is_reached)
        except Exception as error:
            place(error, view, extension)
            raise

    def _read(self, extension: Extension, view: View, complete: list[Uses]) -> list[Any]:
        """An extension's value for each parameter; ``None`` where it leaves the parameter out."""
        guard = guard_of(view)
        seen = [] if guard is None else guard.before(view, ())
        values: list[Any] = []
        for parameter, uses in complete:
            value = None
            try:
                use = self.survey.uses[id(parameter)]
                if use.is_wanted and (not use.unruled or wants_unruled(extension)):
                    shown = uses[0] if len(uses) == 1 else joined(uses)
                    shown = shown.lasting() if extension.is_deferred else shown
                    shown.parameter = parameter
                    seen += () if guard is None else shown.held()
                    value = extension.read(shown)
                    if value is None:
                        raise ShapeError(f"{type(extension).__name__}.read returned None.")
                    seen += () if guard is None else shown.made
            except UnsupportedError as error:
                if not tolerates(extension, view, uses[-1].name, error):
                    raise
            values.append(value)
        if guard is not None:
            guard.after(view, seen, extension, "read")
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
        raise PluginCodeError(
            f"{who} must return a mapping from parameters to values. Got {abridged(values)}."
        )
