"""What a plan keeps about operations: numbers in the order of a walk instead of nodes and calls.

Another graph of the same structure has other nodes in the same order, so that its survey can be
filled in without a walk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

from torch import Tensor

from backpack_core._torch import Node
from backpack_core.contract.propagator import Propagator
from backpack_core.graph import Use, is_leaf
from backpack_core.record.call import Call, Site
from backpack_core.record.models import owner_of
from backpack_operations import faults, nodes
from backpack_operations.bare import add_leaves
from backpack_operations.data import Source
from backpack_operations.noted import Unplanned
from backpack_operations.owners import Owners, losses_with_rows, note_owners, rows_at_loss
from backpack_operations.paths import inside
from backpack_operations.plan import Planned, model_of, plans, trained_by
from backpack_operations.structure import Structure
from backpack_operations.survey import Bare, GraphSurvey
from backpack_operations.told import Told

T = TypeVar("T", bound=Hashable)
RECENT: Final = 8  # indices of samples= that are remembered for one model


class ByValue:
    """A tensor, or ``None``, that compares by value."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByValue) or self.tensor is None or other.tensor is None:
            return isinstance(other, ByValue) and self.tensor is other.tensor
        return self.tensor.equal(other.tensor)

    __hash__ = None  # type: ignore[assignment]


class PlannedData(NamedTuple):
    """What is known about data that a call received; plans do not differ by the source.

    Attributes:
        site: The number of the site.
        ids: The sample of each entry; for a table there are no ids.
        is_unclear: Whether the samples of its rows are unclear; ``None`` for a table.
        source: The rows that they were picked from; ``None`` if they were not picked. While data
            come from there, nothing else needs to be found out.
    """

    site: int
    ids: ByValue
    is_unclear: bool | None
    source: Source | None

    def holds(self, call: Call, owners: Owners) -> bool:
        """Whether the same is known about data that a call received in another pass."""
        if self.source is not None and self.source.gives(call.stored.inputs[0], call.run):
            return True
        if self.is_unclear is not None and owners.is_unclear(call) is not self.is_unclear:
            return False
        return ByValue(owners.ids.of_input(call)) == self.ids


Inside = tuple[tuple[Any, ...], ...]  # of each node: its type, shapes, settings, and edges


def inside_of(site: Site) -> Inside:
    """A description of the operations inside of a call, which are not in the plan's key.

    Torch chooses them by the layout of tensors in memory, too: those of a linear map depend on
    whether the input is contiguous.
    """
    return tuple([_told_of(node) for node in inside(site)])


def _told_of(node: Node) -> tuple[Any, ...]:
    if is_leaf(node):
        return (type(node),)
    shapes = [tuple(metadata.shape) for metadata in node._input_metadata]
    ends = [child is None for child, _ in node.next_functions]
    return type(node), *shapes, *nodes.settings_of(node), *ends


def why_told(told: Told | None, structure: Structure) -> str:
    """Why ``samples=`` allows no plan: with another index each time, plans would serve nobody.

    Empty if the index came before, among the last ones.
    """
    if told is None:
        return ""
    recent = plans.notes.setdefault(model_of(structure), {}).setdefault(Told, {})
    is_new = told.facts not in recent
    recent.pop(told.facts, None)
    recent[told.facts] = None
    if len(recent) > RECENT:
        del recent[next(iter(recent))]
    return "samples=... has another index than the last passes" if is_new else ""


class Walked:
    """A graph in the order of walks: that of its structure, then the inside of opened calls.

    Attributes:
        nodes: The nodes between calls and inside of opened ones, with their numbers.
        places: The outputs of calls and of nodes, with their numbers.
    """

    def __init__(self, survey: GraphSurvey, structure: Structure) -> None:
        opened = [site for site in structure.sites.values() if site.call in survey.opened]
        within = dict.fromkeys(chain(*map(inside, opened)))
        outputs = [(node, nr) for node in within for nr in range(len(node._input_metadata))]
        self.nodes = _numbered((*structure.between, *within))
        self.places = _numbered((*structure.places, *outputs))


def _numbered(items: Iterable[T]) -> dict[T, int]:
    return {item: number for number, item in enumerate(dict.fromkeys(items))}


class PlannedAlignment(NamedTuple):
    """An :class:`Alignment` with numbers instead of nodes.

    Attributes:
        owned: The masks of entries by sample, where entries are in no order.
        sample_ids: The sample of each entry, at outputs of calls where columns are kept apart.
        are_moved: Whether rows may be in another order than those of the model's input.
        received: See :class:`GraphSurvey`, as ``unusual``.
        axes: The axes of samples other than the first, at outputs of calls.
        unusual: Outputs of calls that received data, or contain modules.
        tables: Those among them that are tables.
    """

    positions: tuple[tuple[int, int], ...]
    before: frozenset[int]
    apart: frozenset[int]
    owned: tuple[tuple[int, ByValue], ...]
    sample_ids: tuple[tuple[int, ByValue], ...]
    are_moved: bool
    starts: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    faults: tuple[int, ...]
    received: tuple[tuple[int, int], ...]
    axes: tuple[tuple[int, int], ...]
    unusual: tuple[int, ...]
    tables: tuple[int, ...]

    @classmethod
    def of(cls, survey: GraphSurvey, structure: Structure) -> PlannedAlignment:
        """The alignment of a survey, with numbers.

        Raises:
            Unplanned: It depends on more than the structure.
        """
        alignment, walked = survey.alignment, Walked(survey, structure)
        places = walked.places
        number = {site: n for n, site in enumerate(structure.sites)}
        unusual = [(number[site[:2]], site.edge.node in survey.tables) for site in survey.unusual]
        if alignment.beside:
            raise Unplanned("the loss depends on a parameter without any sample")
        at_sites = (site.edge[:2] for site in survey.sites.values())
        ids = {o: survey.sample_ids.get(o) for o in at_sites if o in alignment.apart}
        try:
            return cls(
                tuple([(places[place], count) for place, count in alignment.positions.items()]),
                frozenset([places[place] for place in alignment.before]),
                frozenset([places[place] for place in alignment.apart]),
                tuple([(places[place], ByValue(own)) for place, own in alignment.owned.items()]),
                tuple([(places[o], ByValue(own)) for o, own in ids.items() if own is not None]),
                bool(survey.are_moved),
                tuple([walked.nodes[node] for node in alignment.starts]),
                tuple([(places[place], run) for place, run in alignment.runs.items()]),
                tuple([number[site] for site in alignment.faults]),
                tuple([(number[site], rows) for site, rows in survey.received.items()]),
                tuple([(number[site], axis) for site, axis in survey.axes.items() if axis]),
                tuple([n for n, _ in unusual]),
                tuple([n for n, is_table in unusual if is_table]),
            )
        except KeyError as error:
            raise Unplanned("samples lie at a place that was not walked to") from error

    def axes_in(self, structure: Structure) -> dict[tuple[Call, int], int]:
        """The axis of the samples at outputs of calls of another graph."""
        keys = [*structure.sites]
        return {**dict.fromkeys(keys, 0), **{keys[n]: axis for n, axis in self.axes}}

    def fill(self, survey: GraphSurvey, structure: Structure) -> None:
        """Fill in the alignment of another graph of the same structure."""
        walked = Walked(survey, structure)
        alignment, places, between = survey.alignment, [*walked.places], [*walked.nodes]
        sites, keys = [*structure.sites.values()], [*structure.sites]
        alignment.positions = {places[n]: count for n, count in self.positions}
        alignment.before = {places[n] for n in self.before}
        alignment.apart = {places[n] for n in self.apart}
        alignment.owned = {places[n]: t for n, own in self.owned if (t := own.tensor) is not None}
        survey.sample_ids = {places[n]: own.tensor for n, own in self.sample_ids}
        alignment.starts = dict.fromkeys([between[n] for n in self.starts])
        alignment.runs = {places[n]: run for n, run in self.runs}
        # The errors are never raised: the first graph was not refused.
        alignment.faults = {keys[n]: faults.elsewhere() for n in self.faults}
        survey.received = {keys[n]: rows for n, rows in self.received}
        survey.axes = self.axes_in(structure)
        survey.unusual, survey.are_moved = [sites[n] for n in self.unusual], self.are_moved
        survey.tables = set().union(*(inside(sites[n]) for n in self.tables))


class PlannedUses(NamedTuple):
    """How operations use parameters, with numbers instead of nodes; see :class:`GraphSurvey`.

    Attributes:
        uses: For each parameter its number, the call, its name there, how often calls read it, how
            often modules without a rule use it, and whether it is wanted.
    """

    leaves: tuple[tuple[int, int], ...]
    bare: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
    freed: tuple[tuple[int, tuple[str, ...]], ...]
    outside: frozenset[int]
    uses: tuple[tuple[int, int, str, int, int, bool], ...]

    @classmethod
    def of(cls, survey: GraphSurvey, structure: Structure) -> PlannedUses | None:
        """The uses in a survey, with numbers; ``None`` if modules with rules use all parameters.

        Raises:
            Unplanned: They depend on more than the structure.
        """
        if not (survey.bare or survey.leaves or survey.freed):
            return None
        walked = Walked(survey, structure)
        node, place = walked.nodes, walked.places
        number = {id(own): n for n, own in enumerate(structure.parameters)}
        first = {call: n for n, (call, _) in reversed([*enumerate(structure.sites)])}
        at_leaves = Counter(id(own) for own in survey.alignment.leaves.values())
        if not _are_owned(survey.bare, structure):
            raise Unplanned("operations use parameters of another model, or of none")
        try:
            leaves = [(place[at], number[id(p)]) for at, p in survey.alignment.leaves.items()]
            freed = [(first[c], tuple([o.name for o in own])) for c, own in survey.freed.items()]
            bare = [
                (number[key], node[use.node], tuple([(node[n], i) for n, i in use.edges]))
                for key, use in survey.bare.items()
            ]
            outside = frozenset([number[key] for key in survey.outside & number.keys()])
            seen = [(number[k], k, use) for k, use in survey.uses.items() if use.call in first]
        except KeyError as error:
            raise Unplanned("a walk by rules does not reach a use of a parameter") from error
        uses = [
            (n, first[u.call], u.name, u.count - at_leaves[key], u.unruled, u.is_wanted)
            for n, key, u in seen
        ]
        return cls(tuple(leaves), tuple(bare), tuple(freed), outside, tuple(uses))

    def hold(self, structure: Structure) -> bool:
        """Whether the parameters that operations use still belong to the model."""
        parameters = structure.parameters
        return not self.bare or _are_owned([id(parameters[n]) for n, *_ in self.bare], structure)

    def fill(self, survey: GraphSurvey, structure: Structure) -> None:
        """Fill in the uses of another graph of the same structure."""
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


def _are_owned(parameters: Iterable[int], structure: Structure) -> bool:
    """Whether the model of a graph owns some parameters, given by ``id``."""
    owners, model = structure.owners, model_of(structure)
    return all(key in owners and owner_of(owners[key][0]) is model for key in parameters)


class PlannedFacts(NamedTuple):
    """What a plan keeps about operations and samples; ``None`` stands for nothing unusual.

    Attributes:
        alignment: Where samples lie; ``None`` if every tensor has them on axis 0.
        uses: How operations use parameters; ``None`` if modules with rules use all of them.
        looked_at: Sample ids that values of data told; see :class:`GraphSurvey`.
        read: Sample ids that values of an index told, at outputs of operations.
        compared: Data that calls received, where the values are those of rows that the model
            received, and tables.
        losses: The sample of each row that a loss received, if columns are split there.
        insides: The operations inside of opened calls that have a rule, by number of the site.
    """

    alignment: PlannedAlignment | None
    uses: PlannedUses | None
    looked_at: tuple[tuple[int, ByValue], ...]
    read: tuple[tuple[int, ByValue], ...]
    compared: tuple[PlannedData, ...]
    losses: tuple[tuple[int, ByValue], ...]
    insides: tuple[tuple[int, Inside], ...]

    @classmethod
    def of(cls, survey: GraphSurvey, structure: Structure, travels: bool) -> PlannedFacts | None:
        """Where samples lie, and how operations use parameters.

        Args:
            survey: What was found out.
            structure: The structure of the graph.
            travels: Whether any quantity is sent, besides autograd's own gradient.

        Raises:
            Unplanned: It depends on more than the structure.
        """
        if why := survey.why_unusual or why_told(survey.told, structure):
            raise Unplanned(why)
        is_turned = survey.are_moved or any(survey.axes.values())
        is_plain = survey.alignment.is_plain and not is_turned
        alignment = None if is_plain else PlannedAlignment.of(survey, structure)
        uses, number = PlannedUses.of(survey, structure), structure.between
        if not survey.looked_at.keys() <= number.keys():
            raise Unplanned("data meet parameters inside a module")
        looked_at = [(number[node], ByValue(ids)) for node, ids in survey.looked_at.items()]
        losses = losses_with_rows(survey) if travels else []
        rows = {site: ByValue(rows_at_loss(survey, site)) for site in losses}
        outputs, known = structure.places, survey.sample_ids
        if not survey.read_at.keys() <= outputs.keys() & known.keys():
            raise Unplanned("an index inside of a module says which rows are whose")
        read = [(outputs[output], ByValue(known[output])) for output in survey.read_at]
        insides = [
            (n, inside_of(site))
            for n, site in enumerate(structure.sites.values())
            if site.call in survey.opened and not site.call.rule.transparent
        ]
        first = {call: n for n, (call, _) in reversed([*enumerate(structure.sites)])}
        ids, unclear = Owners(survey).ids, survey.unclear
        tables = {site.call for site in survey.unusual if site.edge.node in survey.tables}
        compared = [
            PlannedData(
                first[call],
                ByValue(ids.of_input(call)),
                None if call in tables else call in unclear,
                survey.compared.get(call),
            )
            for call in dict.fromkeys((*survey.compared, *tables))
            if call in first
        ]
        places = {site: n for n, site in enumerate(structure.sites)}
        at_losses = tuple([(places[site], owners) for site, owners in rows.items()])
        by_values = tuple(looked_at), tuple(read), tuple(compared)
        found = cls(alignment, uses, *by_values, at_losses, tuple(insides))
        return found if found.is_unusual else None

    @property
    def is_unusual(self) -> bool:
        """Whether there is anything to keep; rows of losses are nothing without an alignment."""
        return any(self._replace(losses=()))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the plan keeps; nobody writes to them."""
        pairs = [*self.looked_at, *self.read, *self.losses]
        if self.alignment is not None:
            pairs += [*self.alignment.owned, *self.alignment.sample_ids]
        values = [*[value for _, value in pairs], *[data.ids for data in self.compared]]
        return [value.tensor for value in values if value.tensor is not None]

    @property
    def without_data(self) -> PlannedFacts | None:
        """The facts without those about data that calls received."""
        found = self._replace(compared=())
        return found if found.is_unusual else None

    def hold(self, known: Planned, structure: Structure, told: Told | None) -> bool:
        """Whether values tell the same sample ids, and opened calls have the same operations.

        And whether the model owns the same parameters: one may have been replaced meanwhile.

        Args:
            known: The plan that these facts belong to.
            structure: The structure of the graph.
            told: The sample of each row that models received, by ``samples=``.
        """
        sites = [*structure.sites.values()]
        if self.uses is not None and not self.uses.hold(structure):
            return False
        if any(inside_of(sites[n]) != planned for n, planned in self.insides):
            return False
        if not (self.looked_at or self.read or self.compared):
            return True
        survey = GraphSurvey(batch_size=known.batch_size, sites=structure.sites, told=told)
        survey.fit_told()
        survey.received = dict.fromkeys(structure.sites, known.batch_size)
        survey.axes = {} if self.alignment is None else self.alignment.axes_in(structure)
        owners, between = Owners(survey), [*structure.between]
        ids = owners.ids
        if not all(data.holds(sites[data.site].call, owners) for data in self.compared):
            return False
        if any(ByValue(ids.of_data_at(between[n])) != before for n, before in self.looked_at):
            return False
        if not self.read:
            return True
        survey.alignment.batch_size = known.batch_size
        known.fill(survey, structure)
        if self.alignment is not None:
            self.alignment.fill(survey, structure)
            survey.sample_ids = {}  # those of the earlier pass
        ids, outputs = Owners(survey).ids, [*structure.places]
        return all(ByValue(ids.at(outputs[n])) == before for n, before in self.read)

    def fill(self, survey: GraphSurvey, structure: Structure) -> None:
        """Fill in the survey of another graph of the same structure."""
        if self.alignment is not None:
            self.alignment.fill(survey, structure)
        if self.uses is not None:
            self.uses.fill(survey, structure)
        sites = [*structure.sites]
        survey.loss_rows = {sites[n]: owners.tensor for n, owners in self.losses}
        add_leaves(survey, structure.owners if self.uses is not None and self.uses.bare else None)


def fill(
    survey: GraphSurvey,
    facts: PlannedFacts | None,
    structure: Structure,
    propagators: Iterable[Propagator],
) -> None:
    """Fill in what lies between the calls of another graph of the same structure."""
    survey.between = dict.fromkeys([(node, ()) for node in structure.between])
    survey.alignment.batch_size = survey.batch_size
    survey.fit_told()
    if facts is None:
        is_other = any(c.rule.reads_inside or c.stored.computed for c, _ in survey.sites)
        survey.is_straight = not (survey.opened or is_other)
    else:
        facts.fill(survey, structure)
        note_owners(survey, propagators)
