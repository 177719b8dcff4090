"""Views of some samples, each with all of its entries of axis 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backpack_core.record.view import View
from backpack_products.some_samples import SomeSamples, counted_from_zero, subsample


def of_samples(view: View, samples: Sequence[int] | None) -> View:
    """The same call with some samples only, each with all of its entries of axis 0.

    Args:
        view: A view of the call.
        samples: Indices of samples of the whole call, whichever are shown, which may be
            repeated; ``None`` for those that are shown.

    Raises:
        UsageError: An index is out of range.
    """
    if samples is None:
        return view
    whole = view.full
    if whole.positions == 1 and whole.samples in (0, whole.batch_size):
        return subsample(whole, samples)  # each entry of axis 0 is a sample
    chosen = counted_from_zero(samples, whole.samples, whole.path)
    owners = whole.owners
    if owners is None:
        owners = torch.arange(whole.samples, device="cpu").repeat_interleave(whole.positions)
    entries = [(owners == n).nonzero().flatten() for n in chosen]
    some = SomeSamples(whole, tuple(torch.cat(entries).tolist()))
    some.owners = torch.arange(len(samples), device="cpu").repeat_interleave(
        torch.tensor([*map(len, entries)], device="cpu")
    )
    return some
