"""Parameters that plain functions use, as places where something arrives."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from backpack_core.contract.bare import bare_call
from backpack_core.graph.alignment import Alignment
from backpack_core.graph.survey import Survey
from backpack_core.plugins.registry import FALLBACK
from backpack_core.record.call import Edge, Site
from backpack_core.record.owner import owners_of


def add_leaves(survey: Survey, alignment: Alignment) -> None:
    """Have the survey know the parameters at which samples are kept apart."""
    for node, parameter in alignment.leaves.items():
        if node not in survey.leaves:
            module, name = _owner(survey, parameter)
            call = bare_call(module, name, parameter, FALLBACK.provenance)
            survey.add_leaf(Site(call, 0, Edge(node, 0)))


def _owner(survey: Survey, parameter: Tensor) -> tuple[Module, str]:
    if id(parameter) in survey.freed:
        return survey.freed[id(parameter)]
    for model in owners_of(call.module for call in survey.trained):
        for module in model.modules():
            for name, own in module._parameters.items():
                if own is parameter:
                    return module, name
    raise AssertionError("only parameters of extended models are kept apart")
