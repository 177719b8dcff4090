"""What is known of a graph, with numbers of its walk instead of nodes, calls and parameters.

So it can be used instead of those of another graph with the same key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import NamedTuple, TypeVar

from torch import Tensor

from backpack_core.graph.survey import Use
from backpack_core.plan.plan import model_of, trained_by
from backpack_core.plan.structure import Structure, Unplanned
from backpack_core.record.owner import owner_of
from backpack_operations import faults
from backpack_operations.owned import owned_by_models
from backpack_operations.paths import inside
from backpack_operations.survey import Bare, GraphSurvey

T = TypeVar("T", bound=Hashable)


class ByValue:
    """A tensor, or ``None``, that compares by value."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByValue) or self.tensor is None or other.tensor is None:
            return isinstance(other, ByValue) and self.tensor is other.tensor
        return self.tensor.equal(other.tensor)

    __hash__ = None  # type: ignore[assignment]


class Walked:
    """A graph in the order of walks: that of its structure, then inside of calls that are opened.

    Attributes:
        nodes: The nodes between calls, and inside of opened ones, with their numbers.
        places: Outputs of calls and of nodes, with their numbers.
    """

    def __init__(self, survey: GraphSurvey, structure: Structure) -> None:
        opened = [site for site in structure.sites.values() if site.call in survey.opened]
        within = dict.fromkeys(chain(*map(inside, opened)))
        outputs = [(node, nr) for node in within for nr in range(len(node._input_metadata))]
        self.nodes = _numbered((*structure.between, *within))
        self.places = _numbered((*structure.places, *outputs))


def _numbered(items: Iterable[T]) -> dict[T, int]:
    return {item: number for number, item in enumerate(dict.fromkeys(items))}


class Numbered(NamedTuple):
    """Where samples lie, with numbers instead of nodes; see :class:`Alignment`.

    Attributes:
        owned: Which entries each sample has, where they are in no order.
        numbers: The sample of each entry, where quantities are kept apart at outputs of calls.
        are_moved: Whether rows of anything may be other samples than rows of the model's input.
        received: How many rows each output's call received.
        unusual: Outputs of calls that received data, or have modules inside.
        tables: Those among them that are tables.
    """

    positions: tuple[tuple[int, int], ...]
    before: frozenset[int]
    apart: frozenset[int]
    owned: tuple[tuple[int, ByValue], ...]
    numbers: tuple[tuple[int, ByValue], ...]
    are_moved: bool
    starts: tuple[int, ...]
    faults: tuple[int, ...]
    received: tuple[tuple[int, int], ...]
    unusual: tuple[int, ...]
    tables: tuple[int, ...]

    @classmethod
    def of(cls, survey: GraphSurvey, structure: Structure) -> Numbered:
        """The numbers.

        Raises:
            Unplanned: They do not tell everything.
        """
        found, walked = survey.alignment, Walked(survey, structure)
        places = walked.places
        number = {site: n for n, site in enumerate(structure.sites)}
        unusual = [(number[site[:2]], site.edge.node in survey.tables) for site in survey.unusual]
        if found.beside:
            raise Unplanned("the loss depends on a parameter without any sample")
        at_sites = (site.edge[:2] for site in survey.sites.values())
        apart = {place: survey.numbers.get(place) for place in at_sites if place in found.apart}
        try:
            return cls(
                tuple([(places[place], count) for place, count in found.positions.items()]),
                frozenset([places[place] for place in found.before]),
                frozenset([places[place] for place in found.apart]),
                tuple([(places[place], ByValue(own)) for place, own in found.owned.items()]),
                tuple([(places[p], ByValue(own)) for p, own in apart.items() if own is not None]),
                bool(survey.are_moved),
                tuple([walked.nodes[node] for node in found.starts]),
                tuple([number[site] for site in found.faults]),
                tuple([(number[site], rows) for site, rows in survey.received.items()]),
                tuple([n for n, _ in unusual]),
                tuple([n for n, is_table in unusual if is_table]),
            )
        except KeyError as error:
            raise Unplanned("samples lie at a place that was not walked to") from error

    def fill(self, survey: GraphSurvey, structure: Structure) -> None:
        """The reverse."""
        walked = Walked(survey, structure)
        found, places, between = survey.alignment, [*walked.places], [*walked.nodes]
        sites, keys = [*structure.sites.values()], [*structure.sites]
        found.positions = {places[n]: count for n, count in self.positions}
        found.before, found.apart = (
            {places[n] for n in self.before},
            {places[n] for n in self.apart},
        )
        found.owned = {places[n]: t for n, kept in self.owned if (t := kept.tensor) is not None}
        survey.numbers = {places[n]: kept.tensor for n, kept in self.numbers}
        found.starts = dict.fromkeys([between[n] for n in self.starts])
        # Nobody is refused: all that counts is where they are.
        found.faults = {keys[n]: faults.elsewhere() for n in self.faults}
        survey.received = {keys[n]: rows for n, rows in self.received}
        survey.axes = dict.fromkeys(keys, 0)
        survey.unusual, survey.are_moved = [sites[n] for n in self.unusual], self.are_moved
        survey.tables = set().union(*(inside(sites[n]) for n in self.tables))


class Loose(NamedTuple):
    """Parameters that operations use, with numbers instead of nodes; see :class:`GraphSurvey`.

    Attributes:
        uses: Of each parameter the call, its name there, and how often it is read at calls, used by
            modules without a rule, and whether it is wanted.
    """

    leaves: tuple[tuple[int, int], ...]
    bare: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
    freed: tuple[tuple[int, tuple[str, ...]], ...]
    outside: frozenset[int]
    uses: tuple[tuple[int, int, str, int, int, bool], ...]

    @classmethod
    def of(cls, survey: GraphSurvey, structure: Structure) -> Loose | None:
        """The numbers; ``None`` if modules with rules own all parameters.

        Raises:
            Unplanned: They do not tell everything.
        """
        if not (survey.bare or survey.leaves or survey.freed):
            return None
        walked = Walked(survey, structure)
        node, place = walked.nodes, walked.places
        number = {id(own): n for n, own in enumerate(structure.parameters)}
        first = {call: n for n, (call, _) in reversed([*enumerate(structure.sites)])}
        at_leaves = Counter(id(own) for own in survey.alignment.leaves.values())
        owners, model = owned_by_models(), model_of(structure)
        if any(key not in owners or owner_of(owners[key][0]) is not model for key in survey.bare):
            raise Unplanned("operations use parameters of another model, or of none")
        try:
            return cls(
                tuple([(place[at], number[id(p)]) for at, p in survey.alignment.leaves.items()]),
                tuple(
                    [
                        (number[key], node[bare.node], tuple([(node[n], i) for n, i in bare.edges]))
                        for key, bare in survey.bare.items()
                    ]
                ),
                tuple(
                    [(first[c], tuple([o.name for o in own])) for c, own in survey.freed.items()]
                ),
                frozenset([number[key] for key in survey.outside & number.keys()]),
                tuple(
                    [
                        (
                            *(number[key], first[use.call], use.name),
                            *(use.count - at_leaves[key], use.unruled, use.is_wanted),
                        )
                        for key, use in survey.uses.items()
                        if use.call in first
                    ]
                ),
            )
        except KeyError as error:
            raise Unplanned("a parameter is used where no walk by rules gets to") from error

    def fill(self, survey: GraphSurvey, structure: Structure) -> None:
        """The reverse."""
        walked = Walked(survey, structure)
        between, places = [*walked.nodes], [*walked.places]
        calls, parameters = [call for call, _ in structure.sites], structure.parameters
        survey.alignment.leaves = {places[at]: parameters[n] for at, n in self.leaves}
        for n, last, edges in self.bare:
            ways = dict.fromkeys([(between[node], position) for node, position in edges])
            survey.bare[id(parameters[n])] = Bare(parameters[n], between[last], ways)
        survey.freed = {calls[n]: trained_by(calls[n], names) for n, names in self.freed}
        survey.outside = {id(parameters[n]) for n in self.outside}
        for n, at, name, count, unruled, is_wanted in self.uses:
            use = Use(parameters[n], calls[at], name, count, unruled, is_wanted)
            survey.uses[id(parameters[n])] = use
        survey.is_shared = any(use.count > 1 for use in survey.uses.values())
