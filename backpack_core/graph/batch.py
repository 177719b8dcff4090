"""Finds the number of samples of a backward pass, and the axis that they are declared to lie on.

Everything that is known of samples starts from this number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from backpack_core.record.call import Call
from backpack_core.record.owner import OWNER_ATTRIBUTE, PATH_ATTRIBUTE, Owner


def declared_axis(call: Call) -> int:
    """The axis that ``extend`` was told for the samples of a call; else 0."""
    attributes = call.module.__dict__
    owner: Owner | None = attributes.get(OWNER_ATTRIBUTE)
    is_loss = call.rule.is_loss
    if owner is None or is_loss or not owner.axes:
        return 0
    return owner.axis_of(attributes.get(PATH_ATTRIBUTE, ""))


def is_doubtful(shape: tuple[int, ...], samples: int) -> bool:
    """Whether several samples are as many as axis 0 is long, and as another axis is."""
    return samples > 1 and shape[:1] == (samples,) and samples in shape[1:]


def batch_of(received: Mapping[tuple[Call, int], int]) -> int:
    """The number of samples: the length that the model received, if it is known.

    What single calls received decides only if that is unknown, and what a model received from
    another one only if there is one loss. A loss may have several entries for
    each sample (``logits.flatten(0, 1)``), and a module may receive something without samples (a
    table of positions), or several samples as one.

    Args:
        received: By call and output, consumers first: the length of axis 0 of what the call
            received; -1 if its output has another.
    """
    sizes = [call.stored.inputs[0].shape[:1].numel() for call, _ in received]
    if not sizes:
        return 0
    losses = {size for (call, _), size in received.items() if call.rule.is_loss}
    calls = dict.fromkeys(call for call, _ in received if not call.rule.is_loss)
    runs = dict.fromkeys(n for call in calls for n in call.run.sizes)
    candidates = runs or dict.fromkeys([*_entering(calls), *(losses if len(losses) == 1 else ())])
    if runs and len(losses) != 1:  # what runs on what others send may see some of the samples
        outer = (call.run for call in calls if not call.run.is_inner)
        candidates = dict.fromkeys(n for run in outer for n in run.sizes) or runs
    candidates.pop(0, None)
    if not candidates or ({*sizes} == {sizes[0]} and sizes[0] in candidates):
        return sizes[0]
    fitting = [n for n in candidates if not any(rows % n for rows in losses)]
    if next(iter(candidates)) not in fitting:  # the first has many for one sample, as graphs have
        fitting = [n for n in fitting if n in sizes]  # nodes, and edges on axis 0 come in pairs
    possible = [n for n in fitting if losses == {n}] or fitting
    return max(possible or candidates, key=sizes.count)  # the first of several


def _entering(calls: Iterable[Call]) -> Iterator[int]:
    """What parts of a model received that were called by themselves, where no graph was behind."""
    for call in calls:
        if call.stored.inputs and not any(call.edges):
            yield call.stored.inputs[0].shape[:1].numel()
