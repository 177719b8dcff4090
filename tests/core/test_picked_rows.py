"""Rows of a tensor are found in another by their values, also where some of them are equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backpack_operations.data import MOST_ROWS, picked_from

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.uint8, torch.bool),
]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, values: int) -> Tensor:
    """Few different values, some of them zeros of either sign."""
    numbers = torch.randint(-values, values, shape)
    if dtype.is_complex:
        return torch.complex(numbers.float(), -numbers.flip(0).float()).to(dtype)
    found = numbers.abs().to(dtype) if dtype in (torch.uint8, torch.bool) else numbers.to(dtype)
    return torch.where(torch.rand(shape) > 0.5, found, -found) if dtype.is_signed else found


@pytest.mark.parametrize("values", [2, 100])
@pytest.mark.parametrize("entries", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_those_of_a_plain_search(dtype: torch.dtype, entries: int, values: int) -> None:
    whole = drawn((4, 5, entries), dtype, values)
    rows, owners = whole.reshape(-1, entries), torch.arange(4).repeat_interleave(5)
    for _ in range(20):
        picked = rows[torch.randint(len(rows), (7,))]
        if bool((picked == picked[:1]).all()):
            continue
        equal = (rows[None] == picked[:, None]).all(2)
        found = picked_from(whole, picked, torch.arange(4), 2)
        assert found is not None
        assert found.rows.equal(equal.int().argmax(1))
        assert found.ids.flatten().equal(owners[equal.int().argmax(1)])
        assert found.is_clear == all(len(owners[where].unique()) == 1 for where in equal)


def test_other_rows_are_not_found() -> None:
    whole = torch.arange(24.0).view(4, 2, 3)
    assert picked_from(whole, torch.rand(5, 3), torch.arange(4), 2) is None
    mixed = torch.cat([whole[1], torch.rand(1, 3)])
    assert picked_from(whole, mixed, torch.arange(4), 2) is None


def test_among_too_many_rows_nothing_is_found() -> None:
    whole = torch.rand(2, MOST_ROWS // 2 + 1)
    assert picked_from(whole, whole.flatten()[:9], torch.arange(2), 2) is None
