"""What this library attaches to core."""

from __future__ import annotations

from typing import Any

from backpack_core import hookimpl
from backpack_core.contract.observer import Observer
from backpack_core.engine.backward import BackwardPass
from backpack_interplay.alone import Skipped
from backpack_interplay.gradient import PlainGradient, WithoutGradients

GRADIENTS: dict[str, type[Observer]] = {
    "shared": PlainGradient,
    "none": WithoutGradients,
    "skipped": Skipped,
}


@hookimpl
def backpack_run(run: BackwardPass) -> Observer | None:
    """Have the plain gradient come from elsewhere than autograd, if that is wanted."""
    kind = GRADIENTS.get(run.context.gradient)
    return None if kind is None else kind()


@hookimpl
def backpack_storage() -> Any:
    """Nothing yet."""
