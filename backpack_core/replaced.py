"""What happens to results that a pass replaces: freed, or their memory is used by a library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _forget(owner: dict[str, Any], name: str, is_wanted: bool = True) -> None:
    owner.pop(name, None)


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Replaced:
    """Two functions that a library may replace.

    Attributes:
        offer: Removes a result from a dictionary; ``is_wanted`` says whether its memory may be
            reused.
        drop: Frees the memory that was not reused; called at the end of a pass.
    """

    offer: Callable[..., None] = _forget
    drop: Callable[[], None] = _nothing


replaced = Replaced()
