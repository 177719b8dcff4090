"""Plans: what was found out about a graph, for all passes of its structure.

A plan names calls by their numbers in the walk. To take it for another pass is to put that pass's
calls in their places.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from torch.nn import Module

from backpack_core.graph import faults
from backpack_core.graph.parameters import Trained
from backpack_core.graph.paths import inside
from backpack_core.graph.survey import Bare, Survey, Use
from backpack_core.plan.structure import Structure, Unplanned
from backpack_core.record.call import Call
from backpack_core.record.owner import owned_by_models, owner_of

MOST: Final = 100  # plans of one model, those that were made last


class Numbered(NamedTuple):
    """Where samples lie, with numbers in the place of nodes; see :class:`Alignment`.

    Attributes:
        received: How many rows each output's call received.
        unusual: Outputs of calls that received data, or have modules inside.
        tables: Those among them that are tables.
    """

    positions: tuple[tuple[int, int], ...]
    before: frozenset[int]
    apart: frozenset[int]
    starts: tuple[int, ...]
    faults: tuple[int, ...]
    received: tuple[tuple[int, int], ...]
    unusual: tuple[int, ...]
    tables: tuple[int, ...]

    @classmethod
    def of(cls, survey: Survey, structure: Structure) -> Numbered:
        """The numbers.

        Raises:
            Unplanned: They do not tell everything.
        """
        found, places = survey.alignment, structure.places
        number = {site: n for n, site in enumerate(structure.sites)}
        unusual = [(number[site[:2]], site.edge.node in survey.tables) for site in survey.unusual]
        if found.owned or found.beside:
            raise Unplanned("rows are in an order that numbers in tensors tell")
        try:
            return cls(
                tuple([(places[place], count) for place, count in found.positions.items()]),
                frozenset([places[place] for place in found.before]),
                frozenset([places[place] for place in found.apart]),
                tuple([structure.between[node] for node in found.starts]),
                tuple([number[site] for site in found.faults]),
                tuple([(number[site], rows) for site, rows in survey.received.items()]),
                tuple([n for n, _ in unusual]),
                tuple([n for n, is_table in unusual if is_table]),
            )
        except KeyError as error:
            raise Unplanned("samples lie at a place that was not walked to") from error

    def fill(self, survey: Survey, structure: Structure) -> None:
        """The reverse."""
        found, places, between = survey.alignment, [*structure.places], [*structure.between]
        sites, keys = [*structure.sites.values()], [*structure.sites]
        found.positions = {places[n]: count for n, count in self.positions}
        found.before, found.apart = (
            {places[n] for n in self.before},
            {places[n] for n in self.apart},
        )
        found.starts = dict.fromkeys([between[n] for n in self.starts])
        # Nobody is refused: all that counts is where they are.
        found.faults = {keys[n]: faults.elsewhere() for n in self.faults}
        survey.received = {keys[n]: rows for n, rows in self.received}
        survey.axes = dict.fromkeys(keys, 0)
        survey.unusual, survey.are_moved = [sites[n] for n in self.unusual], False
        survey.tables = set().union(*(inside(sites[n]) for n in self.tables))


class Loose(NamedTuple):
    """Parameters that operations use, with numbers in the place of nodes; see :class:`Survey`.

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
    def of(cls, survey: Survey, structure: Structure) -> Loose | None:
        """The numbers; ``None`` if modules with rules own all parameters.

        Raises:
            Unplanned: They do not tell everything.
        """
        if not (survey.bare or survey.leaves or survey.freed):
            return None
        node, place = structure.between, structure.places
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
                frozenset([number[key] for key in survey.outside]),
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

    def fill(self, survey: Survey, structure: Structure) -> None:
        """The reverse."""
        between, places = [*structure.between], [*structure.places]
        calls, parameters = [call for call, _ in structure.sites], structure.parameters
        survey.alignment.leaves = {places[at]: parameters[n] for at, n in self.leaves}
        for n, last, edges in self.bare:
            ways = dict.fromkeys([(between[node], position) for node, position in edges])
            survey.bare[id(parameters[n])] = Bare(parameters[n], between[last], ways)
        survey.freed = {calls[n]: _trained(calls[n], names) for n, names in self.freed}
        survey.outside = {id(parameters[n]) for n in self.outside}
        for n, at, name, count, unruled, is_wanted in self.uses:
            use = Use(parameters[n], calls[at], name, count, unruled, is_wanted)
            survey.uses[id(parameters[n])] = use
        survey.is_shared = any(use.count > 1 for use in survey.uses.values())


@dataclass(frozen=True)
class Plan:
    """What is decided about graphs of one form.

    Attributes:
        trained: The names of the parameters that each output of a call is read off at.
        calls: The paths of the modules, one for each output of a call, losses first.
        opened: Which of the calls are gone through node by node.
        batch_size: The number that stands for the number of samples.
        alignment: Where samples lie; ``None`` if every tensor has them on axis 0.
        loose: Parameters that operations use; ``None`` if modules with rules own all of them.
        trust: What passes have shown of the form.
    """

    trained: tuple[tuple[str, ...], ...]
    calls: tuple[str, ...]
    opened: tuple[bool, ...]
    batch_size: int
    alignment: Numbered | None
    loose: Loose | None
    trust: Any = field(compare=False)

    @classmethod
    def of(cls, survey: Survey, structure: Structure, trust: Any) -> Plan:
        """The plan of a pass that was surveyed.

        Raises:
            Unplanned: Passes like it have to be surveyed each time.
        """
        at_leaves = {(site.call, site.index) for site in survey.leaves.values()}
        is_same = survey.sites.keys() - at_leaves == structure.sites.keys()
        if not is_same or survey.batch_size not in structure.lengths:
            raise Unplanned("modules lie where no walk by rules gets to")
        if why := survey.why_unusual:
            raise Unplanned(why)
        is_plain = survey.alignment.is_plain
        alignment = None if is_plain else Numbered.of(survey, structure)
        calls = [call for call, _ in structure.sites]
        return cls(
            tuple([tuple([own.name for own in survey.trained[call]]) for call in calls]),
            tuple([call.path for call in calls]),
            tuple([call in survey.opened for call in calls]),
            structure.lengths[survey.batch_size],
            alignment,
            Loose.of(survey, structure),
            trust,
        )

    @property
    def counts(self) -> bool:
        """Whether it counts entries of axes, and so holds for equal shapes only."""
        return self.alignment is not None or self.loose is not None

    def __str__(self) -> str:
        """The steps, one on a line."""
        steps = zip(self.calls, self.trained, self.opened, strict=True)
        width = max(map(len, self.calls), default=0)
        lines = [f"{'call':<{width}}  what happens there"]
        for path, names, is_opened in steps:
            what = [f"read {', '.join(names)}"] if names else []
            what += ["go through its operations"] if is_opened else []
            lines.append(f"{path:<{width}}  {'; '.join(what) or 'by its rule'}")
        return "\n".join(lines)


class Planned(NamedTuple):
    """A plan for graphs of some shapes.

    Attributes:
        plan: The plan.
        batch_size: The number of samples.
    """

    plan: Plan
    batch_size: int

    def fill(self, survey: Survey, structure: Structure) -> None:
        """Have a survey know what it would find out by itself."""
        survey.is_planned, survey.sites = True, structure.sites
        survey.seen = dict.fromkeys([(node, ()) for node in structure.between])
        survey.batch_size = survey.alignment.batch_size = self.batch_size
        trained, uses, plan = survey.trained, survey.uses, self.plan
        if plan.alignment is not None:
            plan.alignment.fill(survey, structure)
        shown = (t for call, _ in structure.sites for t in call.stored.inputs + call.stored.outputs)
        survey.widest = max(tensor.nbytes for tensor in shown)
        steps = zip(structure.sites, plan.trained, plan.opened, strict=True)
        for (call, _), names, is_opened in steps:
            if is_opened:
                survey.opened.add(call)
            if call not in trained:
                trained[call] = _trained(call, names)
            for name, own, _ in trained[call] if plan.loose is None else ():
                use = uses.get(id(own))
                if use is None:
                    uses[id(own)] = Use(own, call, name, 1)
                else:
                    use.count, survey.is_shared = use.count + 1, True
        if plan.loose is not None:
            plan.loose.fill(survey, structure)


def _trained(call: Call, names: Iterable[str]) -> tuple[Trained, ...]:
    """Parameters of a call, as it used them."""
    owned = call.stored.owned
    used = [(name, owned[name][0]) for name in names]
    return tuple([Trained(name, own, own) for name, own in used])


class Plans:
    """The plans of extended models, which neither copy them nor are kept alive by them."""

    def __init__(self) -> None:
        # By form, and by what tells graphs of one form from those of other shapes.
        self._plans: WeakKeyDictionary[Module, OrderedDict[Hashable, Plan]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Module, OrderedDict[Hashable, Planned]] = WeakKeyDictionary()

    def get(self, asked: Hashable, structure: Structure) -> Planned | None:
        """What is planned for a graph, and for what is asked of it."""
        model = model_of(structure)
        table = self._known.setdefault(model, OrderedDict())
        found = table.get((asked, structure.key))
        if found is None:
            plan = self._plans.get(model, NONE).get((asked, structure.form))
            if plan is not None:
                batch_size = [*structure.lengths][plan.batch_size]
                found = table[asked, structure.key] = Planned(plan, batch_size)
                _shorten(table)
        return found

    def keep(self, asked: Hashable, structure: Structure, plan: Plan) -> None:
        """Have a plan taken from now on."""
        model = model_of(structure)
        self._known.setdefault(model, OrderedDict()).pop((asked, structure.key), None)
        if not plan.counts:
            table = self._plans.setdefault(model, OrderedDict())
            table[asked, structure.form] = plan
            _shorten(table)
        else:  # how many entries a sample has depends on lengths
            known, lengths = self._known[model], [*structure.lengths]
            known[asked, structure.key] = Planned(plan, lengths[plan.batch_size])
            _shorten(known)

    def forget(self, model: Module) -> None:
        """Forget the plans of a model."""
        self._plans.pop(model, None)
        self._known.pop(model, None)


def _shorten(table: OrderedDict[Any, Any]) -> None:
    if len(table) > MOST:
        table.popitem(last=False)  # what is asked for later is planned again


NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
plans: Final = Plans()


def model_of(structure: Structure) -> Module:
    """The model that a graph is of, of several that which ran first."""
    *_, (call, _) = structure.sites  # not the first: a loss may be a new module in each pass
    return owner_of(call.module)
