"""What a loader gives: batches, of inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.nn import Module
from torch.utils.data import DistributedSampler

from backpack_core.errors import UsageError
from backpack_core.record.nested import iter_tensors
from backpack_products.nested import map_tensors

Batch = tuple[Any, Any]


def split(item: Any) -> Batch:
    """Inputs and targets of a batch.

    Args:
        item: ``(inputs, targets)``, or a dictionary with ``"labels"``.

    Raises:
        UsageError: It is neither.
    """
    if isinstance(item, Mapping):
        if "labels" in item:
            return {key: value for key, value in item.items() if key != "labels"}, item["labels"]
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    raise UsageError(
        "A batch is (inputs, targets), or a dictionary with 'labels'. Got "
        f"{type(item).__name__}. Give one batch as a list, [(inputs, targets)]; for batches of "
        "another kind, give batch=, a function that makes (inputs, targets) of one."
    )


def made_by(batch: Callable[[Any], Batch], item: Any) -> Batch:
    """What a user's function makes of an item of the loader.

    Raises:
        UsageError: It is not a pair.
    """
    made: Any = batch(item)
    if isinstance(made, (tuple, list)) and len(made) == 2:
        return made[0], made[1]
    size = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
    raise UsageError(f"batch= must return (inputs, targets). Got {type(made).__name__}{size}.")


def output_of(model: Module, inputs: Any) -> Any:
    """What a model makes of inputs: a tuple of arguments, a dictionary of keywords, or one."""
    if isinstance(inputs, Mapping):
        output = model(**inputs)
        return getattr(output, "logits", output)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


class Kept:
    """Drops the samples that a distributed sampler repeats to give all ranks the same number."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """Find out how many of this rank's samples are its own."""
        sampler = getattr(loader, "sampler", None)
        self._left: int | None = None
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
            total = len(cast(Any, sampler.dataset))
            self._left = len(range(sampler.rank, total, sampler.num_replicas))
            self._drawn = sampler.num_samples
            self._size = getattr(loader, "batch_size", None) or 1  # without one, items are samples

    def of(self, item: Any, make: Callable[[Any], Batch]) -> tuple[Batch, Batch]:
        """A batch, and its samples that are not repeated; ``(None, None)`` if all are.

        Samples are counted as the loader draws them, since targets may have another length.

        Args:
            item: What the loader gives.
            make: Makes inputs and targets of it.

        Raises:
            UsageError: Some samples are repeated, and no tensor has a row for each.
        """
        whole = make(item)
        if self._left is None:
            return whole, whole
        count = min(self._size, self._drawn)
        kept = min(count, self._left)
        self._drawn, self._left = self._drawn - count, self._left - kept
        if kept == count:
            return whole, whole
        if not kept:
            return whole, (None, None)
        cut = partial(_first, kept, count)
        if _has_rows(item, count):
            return whole, make(map_tensors(item, cut))
        if _has_rows(whole, count):
            inputs, targets = whole
            return whole, (map_tensors(inputs, cut), map_tensors(targets, cut))
        raise UsageError(
            f"The DistributedSampler repeats {count - kept} of the {count} samples of this batch, "
            "which must not count twice, and no tensor of the batch has a row for each sample: use "
            "DistributedSampler(..., drop_last=True), or batches of one sample."
        )


def _has_rows(item: Any, count: int) -> bool:
    return any(_is_of_rows(tensor, count) for tensor in iter_tensors(item))


def _is_of_rows(tensor: Tensor, count: int) -> bool:
    return bool(len(tensor.shape)) and len(tensor) == count


def _first(kept: int, count: int, tensor: Tensor) -> Tensor:
    return tensor[:kept] if _is_of_rows(tensor, count) else tensor
