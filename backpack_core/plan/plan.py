"""Plans: what was found out about a graph, for all passes of its structure.

A plan names calls by their numbers in the walk. To take it for another pass is to put that pass's
calls in their places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from torch.nn import Module

from backpack_core.graph.parameters import Trained
from backpack_core.graph.survey import Survey
from backpack_core.plan.structure import Structure
from backpack_core.record.owner import owner_of

MOST: Final = 100  # plans of one model, those that were taken last


@dataclass(frozen=True)
class Plan:
    """What is decided about graphs of one structure, where samples are on axis 0 everywhere.

    Attributes:
        trained: The names of the parameters that each output of a call is read off at.
        opened: Which of the calls are gone through node by node.
        batch_size: The number that stands for the number of samples.
        structure: By which trust knows it.
    """

    trained: tuple[tuple[str, ...], ...]
    opened: tuple[bool, ...]
    batch_size: int
    structure: tuple[object, ...] | None = field(compare=False)

    @classmethod
    def of(cls, survey: Survey, structure: Structure) -> Plan | None:
        """The plan of a pass that was surveyed; ``None`` if it has to be surveyed each time."""
        is_same = survey.sites.keys() == structure.sites.keys()
        if not is_same or not survey.is_plain or survey.batch_size not in structure.lengths:
            return None
        calls = [call for call, _ in structure.sites]
        return cls(
            tuple([tuple([own.name for own in survey.trained[call]]) for call in calls]),
            tuple([call in survey.opened for call in calls]),
            structure.lengths[survey.batch_size],
            survey.structure,
        )

    def fill(self, survey: Survey, structure: Structure) -> None:
        """Have a survey know what it would find out by itself."""
        survey.is_planned, survey.sites = True, structure.sites
        survey.seen = dict.fromkeys([(node, ()) for node in structure.between])
        survey.structure = self.structure
        survey.batch_size = survey.alignment.batch_size = [*structure.lengths][self.batch_size]
        for (call, _), names, is_opened in zip(
            structure.sites, self.trained, self.opened, strict=True
        ):
            if is_opened:
                survey.opened.add(call)
            if call not in survey.trained:
                owned = call.stored.owned
                used = [(name, owned[name][0]) for name in names]
                survey.trained[call] = tuple([Trained(name, own, own) for name, own in used])
            survey.note_uses(call)


class Plans:
    """The plans of extended models, which neither copy them nor are kept alive by them."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Module, OrderedDict[Hashable, Plan]] = WeakKeyDictionary()

    def get(self, model: Module, key: Hashable) -> Plan | None:
        """The plan of a structure, if there is one."""
        table = self._known.get(model)
        found = None if table is None else table.get(key)
        if table is not None and found is not None:
            table.move_to_end(key)
        return found

    def keep(self, model: Module, key: Hashable, plan: Plan) -> None:
        """Have a plan taken from now on."""
        table = self._known.setdefault(model, OrderedDict())
        table[key] = plan
        table.move_to_end(key)
        if len(table) > MOST:
            table.popitem(last=False)

    def forget(self, model: Module) -> None:
        """Forget the plans of a model."""
        self._known.pop(model, None)


plans: Final = Plans()


def model_of(structure: Structure) -> Module:
    """The model that a graph is of, of several that which ran first."""
    *_, (call, _) = structure.sites  # not the first: a loss may be a new module in each pass
    return owner_of(call.module)
