"""The hooks that this library answers."""

from __future__ import annotations

from backpack_core import hookimpl
from backpack_core.plugins.registry import registry
from backpack_operations.between import Operations
from backpack_products.sameness import Lent

registry.sameness = Lent()
registry.forget()


@hookimpl
def backpack_operation() -> type[Operations]:
    """The class that carries quantities through operations between calls."""
    return Operations
