"""The hooks that this library answers."""

from __future__ import annotations

from backpack_core import hookimpl
from backpack_core.contract.observer import Observer
from backpack_core.engine.backward import BackwardPass
from backpack_interplay.alone import Skipped
from backpack_interplay.gradient import PlainGradient, WithoutGradients
from backpack_interplay.storage import Interplay

GRADIENTS: dict[str, type[Observer]] = {
    "shared": PlainGradient,
    "none": WithoutGradients,
    "skipped": Skipped,
}


@hookimpl
def backpack_run(run: BackwardPass) -> Observer | None:
    """The observer for ``backpack(gradient=...)``, unless autograd computes the gradient."""
    kind = GRADIENTS.get(run.context.gradient)
    return None if kind is None else kind()


@hookimpl
def backpack_storage() -> Interplay:
    """The storage that works with checkpoints, parametrizations and shards."""
    return Interplay()
