"""Double precision, a fixed seed, and nothing left behind by any test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backpack_core.engine.active import active_contexts
from backpack_core.errors import forget_warnings

pytest_plugins = ["backpack_core.testing.pytest_plugin"]


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _every_context_ends() -> Iterator[None]:
    yield
    assert not active_contexts()


@pytest.fixture(autouse=True)
def _warnings_are_fresh() -> None:
    """Warnings that come once per process come once per test."""
    forget_warnings()
