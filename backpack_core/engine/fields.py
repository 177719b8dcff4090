"""Which parameters results are stored on, besides those of visited modules.

Parameters that plain functions use get results, and so do shards of a parameter. Results of earlier
passes are removed.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from itertools import chain
from weakref import WeakKeyDictionary

from torch.nn import Module

from backpack_core._torch import Node, shards_in
from backpack_core.contract.bare import bare_call
from backpack_core.contract.extension import Extension
from backpack_core.graph.survey import Survey
from backpack_core.plugins.registry import FALLBACK
from backpack_core.record.call import Edge, Site
from backpack_core.record.owner import owned_by_models, owners_of


def add_leaves(survey: Survey) -> set[Node]:
    """Have the survey know the parameters at which samples are kept apart; returns their nodes."""
    leaves = [item for item in survey.alignment.leaves.items() if item[0] not in survey.leaves]
    known = owned_by_models() if leaves else {}
    for place, parameter in leaves:
        use = survey.uses.get(id(parameter))
        module, name = known[id(parameter)] if use is None else (use.call.module, use.name)
        call = bare_call(module, name, parameter, FALLBACK.provenance)
        survey.add_leaf(Site(call, 0, Edge(*place)))
    return {node for (node, _), _ in leaves}


# Under which plan and names the last pass over a model stored results.
_last: WeakKeyDictionary[Module, tuple[Hashable, list[str]]] = WeakKeyDictionary()


def clear(
    survey: Survey, extensions: Iterable[Extension], new: Container[int], plan: Hashable = None
) -> None:
    """Remove the results of earlier passes from the models that take part.

    Args:
        survey: What is known about the graph.
        extensions: What was asked for.
        new: Parameters with results of passes that are under way, by ``id``.
        plan: The plan of the pass, if it has one. If the pass before had the same, only parameters
            that are used now have results.
    """
    fields = [extension.savefield for extension in extensions]
    models = owners_of(call.module for call, own in survey.trained.items() if plan is None or own)
    last, before = _last.get(models[0], (None, [])) if len(models) == 1 else (None, [])
    is_alike = plan is not None and last is plan and before == fields
    for model in models:
        _last[model] = plan, fields
    for use in survey.uses.values() if is_alike else ():
        for field in fields if id(use.parameter) not in new else ():
            use.parameter.__dict__.pop(field, None)
    for model in () if is_alike else models:
        shards = shards_in(model)
        survey.shards.update(shards)
        tables = (module._parameters.values() for module in model.modules())
        for parameter in chain(*tables, shards.values()):
            is_old = parameter is not None and id(parameter) not in new
            for field in fields if is_old else ():
                parameter.__dict__.pop(field, None)


def stored_by_others(models: Iterable[Module]) -> None:
    """Have the next pass over models look at every parameter: no pass has stored their results."""
    for model in models:
        _last.pop(model, None)


def hand_over(survey: Survey, extensions: Iterable[Extension]) -> None:
    """Copy results from whole parameters to the shards that this process holds."""
    fields = [extension.savefield for extension in extensions]
    models = owners_of(call.module for call in survey.trained) if survey.shards else ()
    shown = {id(parameter) for model in models for parameter in model.parameters()}
    for whole, held in survey.shards.items():
        for field in fields:
            if field in whole.__dict__:
                setattr(held, field, whole.__dict__[field])
                if id(whole) not in shown:  # it is, with set_reshard_after_backward(False)
                    del whole.__dict__[field]
