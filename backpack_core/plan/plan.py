"""Plans: what was found out about a graph, for all passes of its structure.

A plan names calls by their numbers in the walk. To take it for another pass is to put that pass's
calls in their places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from torch.nn import Module

from backpack_core.graph.parameters import Trained
from backpack_core.graph.survey import Survey, Use
from backpack_core.plan.structure import Structure, Unplanned
from backpack_core.record.call import Call
from backpack_core.record.owner import owner_of

MOST: Final = 100  # plans of one model, those that were made last


@dataclass(frozen=True)
class Plan:
    """What is decided about graphs of one form.

    Attributes:
        trained: The names of the parameters that each output of a call is read off at.
        calls: The paths of the modules, one for each output of a call, losses first.
        opened: Which of the calls are gone through node by node.
        reads_inside: Whether a rule has parameters that are read inside of its module.
        batch_size: The number that stands for the number of samples.
        numbers: What lies between calls, as its library numbers it; ``None`` if only calls count.
        kept: What it keeps for observers of passes, by their class.
    """

    trained: tuple[tuple[str, ...], ...]
    calls: tuple[str, ...]
    opened: tuple[bool, ...]
    reads_inside: bool
    batch_size: int
    numbers: Any
    kept: dict[type, Any] = field(compare=False, default_factory=dict)

    @classmethod
    def of(cls, survey: Survey, structure: Structure, numbers: Any) -> Plan:
        """The plan of a pass that was surveyed.

        Args:
            survey: What is known about the graph.
            structure: What tells it from others.
            numbers: What lies between calls.

        Raises:
            Unplanned: Passes like it have to be surveyed each time.
        """
        at_leaves = {(site.call, site.index) for site in survey.leaves.values()}
        is_same = survey.sites.keys() - at_leaves == structure.sites.keys()
        if not is_same or survey.batch_size not in structure.lengths:
            raise Unplanned("modules lie where no walk by rules gets to")
        calls = [call for call, _ in structure.sites]
        return cls(
            tuple([tuple([own.name for own in survey.trained[call]]) for call in calls]),
            tuple([call.path for call in calls]),
            tuple([call in survey.opened for call in calls]),
            any(call.rule.reads_inside for call in calls),
            structure.lengths[survey.batch_size],
            numbers,
        )

    @property
    def is_straight(self) -> bool:
        """Whether rules send on all that arrives, and every call has its samples on axis 0."""
        return self.numbers is None and not any(self.opened) and not self.reads_inside

    @property
    def counts(self) -> bool:
        """Whether it counts entries of axes, and so holds for equal shapes only."""
        return self.numbers is not None

    def __repr__(self) -> str:
        """The steps, a line for each, in the order of the walk."""
        lines = [("step", "at", "what happens")]
        steps = zip(self.calls, self.trained, self.opened, strict=True)
        for number, (path, names, is_opened) in enumerate(steps, 1):
            read = f"read {', '.join(names)}; " if names else ""
            way = "through its operations" if is_opened else "by its rule"
            lines.append((str(number), path, f"{read}go on {way}"))
        width = max(len(path) for _, path, _ in lines)
        text = "\n".join([f"{number:<4}  {path:<{width}}  {what}" for number, path, what in lines])
        more = "\nFor these shapes: what lies between modules is known, too."
        return text + more * self.counts


class Planned(NamedTuple):
    """A plan for graphs of some shapes.

    Attributes:
        plan: The plan.
        batch_size: The number of samples.
    """

    plan: Plan
    batch_size: int

    def fill(self, survey: Survey, structure: Structure) -> None:
        """Have a survey know what it would find out by itself, but for what lies between calls."""
        survey.is_planned, survey.sites = True, structure.sites
        survey.is_straight = self.plan.is_straight
        survey.batch_size = self.batch_size
        trained, uses, plan = survey.trained, survey.uses, self.plan
        stored = [call.stored for call, _ in structure.sites]
        shown = chain.from_iterable([s.inputs + s.outputs for s in stored])
        survey.widest = max(map(attrgetter("nbytes"), shown))
        steps = zip(structure.sites, plan.trained, plan.opened, strict=True)
        for (call, _), names, is_opened in steps:
            if is_opened:
                survey.opened.add(call)
            if call not in trained:
                trained[call] = trained_by(call, names) if names else ()
            for name, own, _ in trained[call]:
                use = uses.get(id(own))
                if use is None:
                    uses[id(own)] = Use(own, call, name, 1)
                else:
                    use.count, survey.is_shared = use.count + 1, True


class Plans:
    """The plans of extended models, which neither copy them nor are kept alive by them."""

    def __init__(self) -> None:
        # By form, and by what tells graphs of one form from those of other shapes.
        self._plans: WeakKeyDictionary[Module, OrderedDict[Hashable, Plan]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Module, OrderedDict[Hashable, Planned]] = WeakKeyDictionary()
        # What observers of passes know of a model, by their class.
        self.notes: WeakKeyDictionary[Module, dict[type, Any]] = WeakKeyDictionary()

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

    def latest(self, model: Module) -> Plan | None:
        """The plan of a model that was made last, if there is one."""
        found = [*self._plans.get(model, NONE).values()]
        found += [each.plan for each in self._known.get(model, NONE).values()]
        return found[-1] if found else None

    def forget(self, model: Module) -> None:
        """Forget the plans of a model, and what observers know of it."""
        self._plans.pop(model, None)
        self._known.pop(model, None)
        self.notes.pop(model, None)


def trained_by(call: Call, names: Iterable[str]) -> tuple[Trained, ...]:
    """Parameters of a call, as it used them."""
    owned = call.stored.owned
    return tuple([Trained(name, owned[name][0], owned[name][0]) for name in names])


def model_of(structure: Structure) -> Module:
    """The model that a graph is of, of several that which ran first."""
    *_, (call, _) = structure.sites  # not the first: a loss may be a new module in each pass
    return owner_of(call.module)


def _shorten(table: OrderedDict[Any, Any]) -> None:
    if len(table) > MOST:
        table.popitem(last=False)  # what is asked for later is planned again


NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
plans: Final = Plans()
