"""The short form in which the lists of cases are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from backpack_core.testing import RuleCase


def layer(factory: Callable[[], Module], *shape: int, **options: Any) -> RuleCase:
    """A layer on one random input ``[N, *shape]``."""
    return RuleCase(factory, lambda n: torch.randn(n, *shape), **options)


def positive(factory: Callable[[], Module], *shape: int, **options: Any) -> RuleCase:
    """A layer on one input ``[N, *shape]`` of positive numbers."""
    return RuleCase(factory, lambda n: 0.1 + torch.rand(n, *shape), **options)


def evaluated(factory: Callable[[], Module]) -> Callable[[], Module]:
    """The module in evaluation mode."""
    return lambda: factory().eval()


def randomised(factory: Callable[[], Module]) -> Callable[[], Module]:
    """The module with random parameters and statistics, where torch starts from zeros and ones."""

    def make() -> Module:
        module = factory()
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.data.uniform_(0.5, 1.5)
        return module

    return make
