"""Double precision, a fixed seed, and nothing left behind by any test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backpack_core import traversal
from backpack_core.context import _STACKS

pytest_plugins = ["backpack_core.testing.pytest_plugin", "tests.nets.plugin"]


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
    assert not _STACKS


@pytest.fixture(autouse=True)
def _warnings_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that come once per process come once per test."""
    monkeypatch.setattr(traversal, "_warned", set())
