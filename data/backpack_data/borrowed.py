"""A model and a loss for the time of a run: extended, without gradients; then as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from warnings import catch_warnings, filterwarnings

from torch import Tensor
from torch.nn import Module

from backpack_core import extend, is_extended, unextend
from backpack_core.errors import BackpackWarning
from backpack_core.record.models import OWNER_ATTRIBUTE


@contextmanager
def same_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restores ``.grad`` after the block, where autograd cannot be told to leave it out."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        with catch_warnings():
            filterwarnings("ignore", "Autograd computes every gradient", BackpackWarning)
            yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


class extended:
    """Extends model and loss inside the block, and restores them after it."""

    def __init__(self, *modules: Any) -> None:
        """Find those that are not extended.

        Args:
            modules: A model, and a loss, which may be a function.
        """
        self._modules = [m for m in modules if isinstance(m, Module) and not is_extended(m)]
        self._before: list[tuple[Module, dict[str, int]]] = []  # parts that are extended, and axes

    def __enter__(self) -> None:
        """Extend them."""
        for module in self._modules:
            axes: dict[str, int] = {}
            for path, part in module.named_modules():
                owner = part.__dict__.get(OWNER_ATTRIBUTE)
                if owner is not None and owner.module is part:
                    self._before.append((part, owner.axes))
                    known = owner.axes.items()
                    axes |= {".".join(filter(None, (path, own))): axis for own, axis in known}
            extend(module, batch_axis=axes)

    def __exit__(self, *exc: object) -> None:
        """Make them what they were: parts that were extended stay so."""
        for module in self._modules:
            unextend(module)
        for part, axes in self._before:
            extend(part, batch_axis=axes)
