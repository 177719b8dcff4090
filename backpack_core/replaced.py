"""What becomes of the results that a pass replaces: they go, or a library takes their memory."""

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
    """Functions that a library may put instead of these.

    Attributes:
        offer: Takes a result out of a dictionary; ``is_wanted`` says whether its memory may be
            written again.
        drop: Lets go of what was taken and not written, when a pass is over.
    """

    offer: Callable[..., None] = _forget
    drop: Callable[[], None] = _nothing


replaced = Replaced()
