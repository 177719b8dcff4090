"""Captured steps are compared with the engine bit by bit: a GPU has to give the same twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def reproducible(without_cudnn: None) -> Iterator[None]:
    """Sums in one order; a recorded step of a recurrent layer does without cuDNN in any case."""
    before = torch.are_deterministic_algorithms_enabled()
    is_wanted = before or torch.get_default_device().type != "cpu"
    torch.use_deterministic_algorithms(is_wanted, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
