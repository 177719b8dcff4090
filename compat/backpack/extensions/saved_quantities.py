"""A store of quantities by key, as third-party code knows it. Imports nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SavedQuantities:
    """Quantities by key; a second one with the same key is added to the first.

    The core keeps its own quantities elsewhere, with the autograd graph; it does not use this
    class.
    """

    def __init__(self) -> None:
        self._saved_quantities: dict[int, Any] = {}

    def save_quantity(
        self, key: int, quantity: Any, accumulation_function: Callable[[Any, Any], Any]
    ) -> None:
        """Store a quantity, accumulated with one that is there."""
        if key in self._saved_quantities:
            quantity = accumulation_function(self._saved_quantities[key], quantity)
        self._saved_quantities[key] = quantity

    def retrieve_quantity(self, key: int, delete_old: bool) -> Any:
        """Return a quantity, or ``None``; forget it on request."""
        if delete_old:
            return self._saved_quantities.pop(key, None)
        return self._saved_quantities.get(key)
