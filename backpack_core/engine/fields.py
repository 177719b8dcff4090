"""Results on parameters: those of earlier passes are removed.

A pass removes results from every parameter of the models that take part. So results of an earlier
pass never stand next to new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from itertools import chain
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module

from backpack_core.engine.active import Context
from backpack_core.graph.survey import Survey
from backpack_core.record.call import Call
from backpack_core.record.owner import owners_of
from backpack_core.record.storage import storage
from backpack_core.replaced import replaced

# The plan of the last pass over each model, and the names of the results that it stored.
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
        calls: The calls of the pass; their modules tell the models.
        context: What was asked for.
        new: The ``id`` of each parameter that a pass under way has stored results on.
        plan: The plan of the pass, if it has one. If the pass before had the same plan, only the
            parameters in ``used`` have results.
        used: The parameters that the pass uses; needed with a plan.
    """
    fields = [extension.savefield for extension in context.extensions]
    models = owners_of(call.module for call in calls)
    before = [_last.get(model, (None, ())) for model in models]
    for model in models:
        _last[model] = plan, fields
    # Memory that is offered and not written again would only take space.
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
    """Note that results were stored without a pass, so that the next pass looks at every parameter.

    Args:
        models: The models.
        fields: The names of the results, whose memory the next pass may write again.
    """
    for model in models:
        _last[model] = None, fields
