"""Which parameters results are stored on, besides those of visited modules.

Parameters that plain functions use get results, and so do shards of a parameter. Results of earlier
passes are removed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from itertools import chain
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module

from backpack_core.contract.extension import Extension
from backpack_core.engine.active import Context
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Call
from backpack_core.record.owner import owners_of
from backpack_core.record.storage import storage
from backpack_core.replaced import replaced

# Under which plan and names the last pass over a model stored results.
_last: WeakKeyDictionary[Module, tuple[Hashable, list[str]]] = WeakKeyDictionary()


def clear(
    survey: Survey,
    calls: Iterable[Call],
    context: Context,
    new: Collection[int],
    plan: Hashable = None,
    used: Iterable[Tensor] = (),
) -> None:
    """Remove the results of earlier passes from the models that take part.

    Args:
        survey: What is known about the graph.
        calls: Those of the models.
        context: What was asked for.
        new: Parameters with results of passes that are under way, by ``id``.
        plan: The plan of the pass, if it has one. If the pass before had the same, only parameters
            that are used now have results.
        used: The parameters that are used now; needed with a plan.
    """
    fields = [extension.savefield for extension in context.extensions]
    models = owners_of(call.module for call in calls)
    before = [_last.get(model, (None, ())) for model in models]
    for model in models:
        _last[model] = plan, fields
    # What is offered and not taken would only take space.
    offers = not context.keeps_results and all(fields == known for _, known in before)
    if offers and len(models) == 1 and plan is not None and before[0][0] is plan:
        parameters: Iterable[Tensor | None] = used
    else:
        survey.shards.update(storage().shards_in(models))
        modules = chain(*(model.modules() for model in models))
        parameters = chain(*(m._parameters.values() for m in modules), survey.shards.values())
    for parameter in parameters:
        if parameter is not None and (not new or id(parameter) not in new):
            for field in fields:
                replaced.offer(parameter.__dict__, field, offers)


def stored_by_others(models: Iterable[Module], fields: list[str]) -> None:
    """Have the next pass over models look at every parameter: no pass has stored their results.

    Args:
        models: The models.
        fields: The names of what was stored, of which that pass may write the memory.
    """
    for model in models:
        _last[model] = None, fields


def hand_over(survey: Survey, extensions: Iterable[Extension]) -> None:
    """Give results of whole parameters to the shards that this process holds, if there are any."""
    if survey.shards:
        models = owners_of(call.module for call in survey.trained)
        shown = {id(parameter) for model in models for parameter in model.parameters()}
        fields = [extension.savefield for extension in extensions]
        storage().hand_over(survey.shards, shown, fields)
