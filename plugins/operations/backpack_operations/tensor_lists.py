"""Lists of tensors that a model received, one tensor for each sample or several to be joined.

A list is a set of arguments whose paths (``args[0][3]``) differ at one depth only.
"""

from __future__ import annotations

from collections import defaultdict

from torch.nn.utils.rnn import PackedSequence

from backpack_core.record.call import Call
from backpack_core.record.models import Run
from backpack_operations.received import ModelInput


def lists(run: Run, depth: int) -> list[list[ModelInput]]:
    """The lists among the arguments of a run whose items' paths differ at one depth.

    A list may have one item, but a single argument is not a list.
    """
    by_other = defaultdict[tuple[int, ...], list[ModelInput]](list)
    for given in run.inputs if not run.axis else ():
        if len(given.path) > depth:
            by_other[given.path[:depth] + given.path[depth + 1 :]].append(given)
    return [items for items in by_other.values() if len(items) > 1 or depth]


def lists_of_kinds(run: Run, depth: int) -> list[list[ModelInput]]:
    """The same, split by dtype and number of axes: an index beside the items is none of them."""
    by_kind, every = [], lists(run, depth)
    for items in every:
        kinds = [(given.dtype, len(given.shape)) for given in items]
        for kind in dict.fromkeys(kinds):
            by_kind.append([g for g, own in zip(items, kinds, strict=True) if own == kind])
    # Separate arguments of different shapes are usually different things of each sample.
    several = [g for g in by_kind if len(g) > 1 and (len(g[0].path) > 1 or can_join(g))]
    return several or [items for items in every if len(items) == 1]


def all_kinds(run: Run) -> list[list[ModelInput]]:
    """The lists of one kind at all depths."""
    return [items for depth in range(deepest(run)) for items in lists_of_kinds(run, depth)]


def joinable(run: Run) -> list[list[ModelInput]]:
    """The lists at all depths that a model may have joined along axis 0."""
    every = (items for depth in range(deepest(run)) for items in lists(run, depth))
    return [items for items in every if can_join(items)]


def deepest(run: Run) -> int:
    """The length of the longest path of an argument."""
    return max((len(given.path) for given in run.inputs), default=0)


def can_join(items: list[ModelInput]) -> bool:
    """Whether tensors have the same shape but for axis 0."""
    return all(given.shape for given in items) and len({given.shape[1:] for given in items}) == 1


def is_packed(call: Call) -> bool:
    """Whether a module received packed sequences, which say by themselves where samples are."""
    given = () if call.is_released else call.stored.args
    return any(isinstance(each, PackedSequence) for each in given)


def is_given(call: Call) -> bool:
    """Whether a module received a tensor as the model did, or a view of it."""
    return bool(call.run.receives(call.stored.inputs[:1]))


def joined_lengths(call: Call) -> set[int]:
    """The lengths of the tensors of a list, if a module received as many rows as all of them.

    By chance, an item itself may be as long as others together.
    """
    if is_packed(call) or is_given(call):
        return set()
    rows = call.stored.inputs[0].shape[:1].numel()
    lengths = [[given.shape[0] for given in items] for items in joinable(call.run)]
    return {n for each in lengths if sum(each) == rows for n in each}
