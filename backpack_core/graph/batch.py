"""How many samples a backward pass has, and where they are said to lie."""

from __future__ import annotations

from collections.abc import Mapping

from backpack_core.record.call import Call
from backpack_core.record.owner import OWNER_ATTRIBUTE, PATH_ATTRIBUTE, Owner


def declared_axis(call: Call) -> int:
    """Where the samples of a call are said to lie: on axis 0 unless ``extend`` was told another."""
    attributes = call.module.__dict__
    owner: Owner | None = attributes.get(OWNER_ATTRIBUTE)
    is_loss = call.rule.is_loss
    if owner is None or is_loss or not owner.axes:
        return 0
    return owner.axis_of(attributes.get(PATH_ATTRIBUTE, ""))


def is_doubtful(shape: tuple[int, ...], samples: int) -> bool:
    """Whether axis 0 is not the only one that is as long as the batch, of several samples."""
    return samples > 1 and shape[:1] == (samples,) and samples in shape[1:]


def batch_of(received: Mapping[tuple[Call, int], int]) -> int:
    """The number of samples: of the model's input, where that is known.

    A loss may have several entries for each sample (``logits.flatten(0, 1)``), and a module may
    receive something else (a table of positions), or several samples as one.

    Args:
        received: How long axis 0 is of what calls received, consumers first; -1 where their output
            differs.
    """
    sizes = [call.stored.inputs[0].shape[:1].numel() for call, _ in received if call.stored.inputs]
    if not sizes:
        return 0
    candidates = dict.fromkeys(
        n for call, _ in received if not call.rule.is_loss for n in call.run.sizes
    )
    candidates.pop(0, None)
    if not candidates or ({*sizes} == {sizes[0]} and sizes[0] in candidates):
        return sizes[0]
    losses = {size for (call, _), size in received.items() if call.rule.is_loss}
    fitting = [n for n in candidates if not any(rows % n for rows in losses)]
    if next(iter(candidates)) not in fitting:  # the first has many for one sample, as graphs have
        fitting = [n for n in fitting if n in sizes]  # nodes, and edges on axis 0 come in pairs
    possible = [n for n in fitting if losses == {n}] or fitting
    return max(possible or candidates, key=sizes.count)  # the first of several
