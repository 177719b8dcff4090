"""What a loader gives: batches, of inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.nn import Module
from torch.utils.data import DistributedSampler

from backpack_core.errors import UsageError
from backpack_core.record.nested import iter_tensors, map_tensors

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

    def of(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """The samples of a batch that are not repeated; ``(None, None)`` if all are."""
        if self._left is None:
            return inputs, targets
        count = len(next(iter_tensors(targets)))
        kept, self._left = min(count, self._left), self._left - min(count, self._left)
        if kept == count:
            return inputs, targets
        if not kept:
            return None, None
        cut = partial(_first, kept, count)
        return map_tensors(inputs, cut), map_tensors(targets, cut)


def _first(kept: int, count: int, tensor: Tensor) -> Tensor:
    return tensor[:kept] if len(tensor.shape) and len(tensor) == count else tensor
