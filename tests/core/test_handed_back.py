"""Rows that an index adds to others: the same is found out as by a call of the node."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from backpack_operations import sample_ids
from backpack_operations.sample_ids import SampleIds, along


def _equal(first: SampleIds | None, second: SampleIds | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.expand(6, 2).equal(second.expand(6, 2))


@pytest.mark.host("numbers of samples are looked up there")
@pytest.mark.parametrize("seed", range(60))
def test_as_by_a_call_of_the_node(seed: int) -> None:
    choice = random.Random(seed)
    index = torch.tensor([choice.randrange(6) for _ in range(choice.choice([1, 2, 4]))])
    rows = torch.arange(choice.choice([2, 3]))
    source = torch.ones(len(index), 2, requires_grad=True)
    table = torch.ones(6, 2, requires_grad=True)
    of_table = torch.tensor([choice.choice([-1, 0, 1]) for _ in range(6)])
    is_alike = choice.random() < 0.5
    of_source = of_table[index] if is_alike else torch.randint(-1, 2, (len(index),))
    known: dict[int, SampleIds] = {1: along(of_source, 0, (len(index), 2))}
    if choice.random() < 0.5:
        known[0] = along(of_table, 0, (6, 2))
    result = (table * 1).index_add(0, index, source * 1)
    node: Any = result.grad_fn
    expected = sample_ids._through_linear(node, 0, known, rows)
    assert _equal(sample_ids._added(known, index, (6, 2), rows), expected)
