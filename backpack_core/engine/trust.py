"""In which passes alignment is measured: those whose structure is not known to be right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from torch.nn import Module

from backpack_core.graph.survey import Survey
from backpack_core.record.owner import owner_of

_TRUST: Final = "_backpack_trust"


@dataclass
class Trust:
    """What is known of one structure.

    Attributes:
        passes: How many passes had it.
        open_sites: Outputs of calls at which nothing could be compared yet, by their position in
            the walk; ``None`` before the first pass.
    """

    passes: int = 0
    open_sites: set[int] | None = field(default=None)

    def is_due(self) -> bool:
        """Count a pass; whether it should be measured: the first, and 1, 2, 4, 8, … after it."""
        self.passes += 1
        before = self.passes - 1
        return self.open_sites is None or bool(self.open_sites) or before & (before - 1) == 0


def trust_in(survey: Survey, kind: str) -> Trust:
    """What is known of the structure of a pass.

    Structures differ by the calls and the nodes between them, in train and eval mode, and by which
    axes are as long as the batch; not by sizes, so that padding to other lengths is the same one.

    Args:
        survey: The graph.
        kind: What is asked for, where that makes a difference.
    """
    *_, (call, _) = survey.sites  # the first may be that of a loss, made anew for every pass
    table = owner_of(call.module).__dict__.setdefault(_TRUST, {})
    found: Trust = table.setdefault(hash((kind, *_structure(survey))), Trust())
    return found


def forget(module: Module) -> None:
    """Trust nothing of a module any more."""
    module.__dict__.pop(_TRUST, None)


def _structure(survey: Survey) -> tuple[object, ...]:
    calls = []
    for call, index in survey.sites:
        stored = call.stored
        axes = [
            tuple(size == survey.batch_size for size in t.shape)
            for t in (*stored.inputs, stored.outputs[index])
        ]
        calls.append((call.path, index, call.training, *axes))
    return (*calls, *survey.names())
