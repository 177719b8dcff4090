"""Plans: what was found out about a graph, for all passes of the same structure.

A plan names calls by their numbers in the walk of :class:`Structure`. So it serves another pass
once that pass's calls are put in their places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module

from backpack_core.engine.active import Context
from backpack_core.graph import Trained, Use
from backpack_core.record.call import Call
from backpack_core.record.models import owner_of
from backpack_operations.noted import Unplanned
from backpack_operations.structure import Structure

if TYPE_CHECKING:  # these files import this one
    from backpack_operations.planned import PlannedFacts
    from backpack_operations.survey import GraphSurvey

MOST: Final = 100  # plans that are kept for one model; older ones are forgotten


class Step(NamedTuple):
    """What is decided about an output of a call.

    Attributes:
        path: The path of the module.
        names: The parameters that are read there.
        is_opened: Whether quantities go on through the operations inside, and not by the rule.
        to: The steps that quantities are sent to; 0 stands for operations between modules. Empty if
            nothing is sent, for example if extensions read autograd's own gradient.
    """

    path: str
    names: tuple[str, ...]
    is_opened: bool
    to: tuple[int, ...]

    def __str__(self) -> str:
        """What happens at the output, in words."""
        done = [f"read {', '.join(self.names)}"] if self.names else []
        if self.to:
            whom = [str(number) if number else "operations" for number in self.to]
            way = "through its operations" if self.is_opened else "by its rule"
            done.append(f"send to {', '.join(whom)} {way}")
        return "; ".join(done) or "free what it stored"


@dataclass(frozen=True)
class Plan:
    """What is decided about graphs of one form.

    Attributes:
        steps: What happens at each output of a call, losses first.
        batch_size: The number that stands for the batch size in :attr:`Structure.lengths`.
        facts: What was found out between calls, with numbers instead of nodes; ``None`` if
            nothing.
        kept: What observers of passes leave in the plan, by their class.
    """

    steps: tuple[Step, ...]
    batch_size: int
    facts: PlannedFacts | None
    kept: dict[type, Any] = field(compare=False, default_factory=dict)

    @classmethod
    def of(
        cls, survey: GraphSurvey, structure: Structure, facts: PlannedFacts | None, travels: bool
    ) -> Plan:
        """Make the plan of a pass that was surveyed.

        Args:
            survey: What is known about the graph.
            structure: The structure of the graph.
            facts: See the attribute.
            travels: Whether any quantity is sent, besides autograd's own gradient.

        Raises:
            Unplanned: Passes like this one must be surveyed each time.
        """
        at_leaves = {(site.call, site.index) for site in survey.leaves.values()}
        is_same = survey.sites.keys() - at_leaves == structure.sites.keys()
        if not is_same or survey.batch_size not in structure.lengths:
            raise Unplanned("a walk by rules does not reach some modules")
        calls = [call for call, _ in structure.sites]
        number = {site.edge[:2]: n for n, site in enumerate(structure.sites.values(), 1)}
        steps = []
        for call in calls:
            edges = [edge[:2] for edge in call.edges if edge is not None] if travels else ()
            to, names = [number.get(edge, 0) for edge in edges], survey.trained[call]
            is_opened = call in survey.opened
            steps.append(Step(call.path, tuple([n for n, *_ in names]), is_opened, tuple(to)))
        return cls(tuple(steps), structure.lengths[survey.batch_size], facts)

    @property
    def without_data(self) -> Plan:
        """The plan without what values of data told, which structures do not determine."""
        facts = None if self.facts is None else self.facts.without_data
        return replace(self, facts=facts)

    @property
    def counts(self) -> bool:
        """Whether the plan counts entries of axes, and so holds for equal shapes only."""
        return self.facts is not None


@dataclass(eq=False)
class Planned:
    """A plan for graphs with certain shapes.

    Attributes:
        plan: The plan.
        batch_size: The number of samples.
        kept: What observers keep of passes with these shapes, by their class.
    """

    plan: Plan
    batch_size: int
    kept: dict[type, Any] = field(default_factory=dict)

    def fill(self, survey: GraphSurvey, structure: Structure) -> None:
        """Fill a survey with what a walk would find, except for what lies between calls."""
        trained, uses = survey.trained, survey.uses
        stored = [call.stored for call, _ in structure.sites]
        shown = chain.from_iterable([s.inputs + s.outputs for s in stored])
        survey.widest = max(map(attrgetter("nbytes"), shown))
        for (call, _), step in zip(structure.sites, self.plan.steps, strict=True):
            if step.is_opened:
                survey.opened.add(call)
            if call not in trained:
                trained[call] = trained_by(call, step.names) if step.names else ()
            for name, own, _ in trained[call]:
                use = uses.get(id(own))
                if use is None:
                    uses[id(own)] = Use(own, call, name, 1)
                else:
                    use.count, survey.is_shared = use.count + 1, True


class Asked(NamedTuple):
    """What plans depend on, besides the graph.

    Attributes:
        tells_samples: Whether any result tells samples apart, and is not only a sum over them.
        extensions: What each extension is, and what it needs.
    """

    tells_samples: bool
    extensions: tuple[Hashable, ...]

    @classmethod
    def of(cls, context: Context) -> Asked:
        """What a block asks for."""
        extensions, tells = list[Hashable](), False
        for e in context.extensions:
            propagator = e.propagator
            tells |= propagator.per_sample and not e.sums_samples
            what = type(e), e.fail_mode, propagator, e.needs_normalisers, bool(e.carriers)
            extensions.append(what)
        return cls(tells, tuple(extensions))


class Plans:
    """The plans of extended models; copies of a model have none, and plans keep no model alive."""

    def __init__(self) -> None:
        # Plans by form; plans with their shapes by key.
        self._plans: WeakKeyDictionary[Module, OrderedDict[Hashable, Plan]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Module, OrderedDict[Hashable, Planned]] = WeakKeyDictionary()
        # What observers of passes know about each model, by their class.
        self.notes: WeakKeyDictionary[Module, dict[type, Any]] = WeakKeyDictionary()

    def get(self, asked: Hashable, structure: Structure) -> Planned | None:
        """The plan for a graph and for what is asked of it; ``None`` if there is none."""
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
        """Keep a plan for later passes."""
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
        """The newest plan of a model, if there is one."""
        found = self._of(model)
        return found[-1] if found else None

    def tensors(self, model: Module) -> list[Tensor]:
        """The tensors that the plans of a model keep; nobody writes to them."""
        return [own for p in self._of(model) if p.facts is not None for own in p.facts.tensors]

    def _of(self, model: Module) -> list[Plan]:
        found = [*self._plans.get(model, NONE).values()]
        return found + [each.plan for each in self._known.get(model, NONE).values()]

    def forget(self, model: Module) -> None:
        """Forget the plans of a model, and what observers know about it."""
        self._plans.pop(model, None)
        self._known.pop(model, None)
        self.notes.pop(model, None)


def trained_by(call: Call, names: Iterable[str]) -> tuple[Trained, ...]:
    """The named parameters of a call, as it used them."""
    owned, computed = call.stored.owned, call.stored.computed
    found = []
    for name in dict.fromkeys(names) if computed else names:
        tensor, _ = owned[name]
        found += [Trained(name, leaf, tensor) for leaf in computed.get(name, (tensor,))]
    return tuple(found)


def model_of(structure: Structure) -> Module:
    """The extended model of a graph; of several models, the one that ran first."""
    *_, (call, _) = structure.sites  # not the first: a loss may be a new module in each pass
    return owner_of(call.module)


def _shorten(table: OrderedDict[Any, Any]) -> None:
    if len(table) > MOST:
        table.popitem(last=False)


NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
plans: Final = Plans()
