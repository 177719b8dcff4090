"""How many samples a backward pass has."""

from __future__ import annotations

from collections.abc import Collection

from backpack_core.record.call import Call, Site


def batch_of(sites: Collection[Site]) -> int:
    """The number of samples: of the model's input, where that is known.

    A loss may have several entries for each sample (``logits.flatten(0, 1)``), and a module may
    receive something else (a table of positions), or several samples as one.

    Args:
        sites: Outputs of calls, consumers first.
    """
    calls = [site.call for site in sites if site.call.stored.inputs]
    losses = {_received(call) for call in calls if call.rule.is_loss}
    sizes = [n for call in calls if not call.rule.is_loss for n in call.sizes if n]
    candidates = list(dict.fromkeys(sizes))
    if losses:
        same = [n for n in candidates if losses == {n}]
        candidates = same or [n for n in candidates if not any(rows % n for rows in losses)]
    if not candidates:
        return _received(calls[0]) if calls else 0
    received = [_received(call) for call in calls]
    return max(candidates, key=received.count)  # the first of several


def _received(call: Call) -> int:
    first = call.stored.inputs[0]
    return first.shape[0] if first.dim() else 0
