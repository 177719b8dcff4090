"""Parameters that plain functions use, as places where something arrives."""

from __future__ import annotations

from backpack_core.contract.bare import bare_call
from backpack_core.graph.alignment import Alignment
from backpack_core.graph.survey import Survey
from backpack_core.plugins.registry import FALLBACK
from backpack_core.record.call import Edge, Site
from backpack_core.record.owner import owned_by_models


def add_leaves(survey: Survey, alignment: Alignment) -> None:
    """Have the survey know the parameters at which samples are kept apart."""
    known = None
    for node, parameter in alignment.leaves.items():
        if node not in survey.leaves:
            known = owned_by_models() if known is None else known
            module, name = survey.freed.get(id(parameter)) or known[id(parameter)]
            call = bare_call(module, name, parameter, FALLBACK.provenance)
            survey.add_leaf(Site(call, 0, Edge(node, 0)))
