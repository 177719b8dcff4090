"""First-order extensions for backpack-core: individual gradients and their statistics."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from backpack_products.computing import declare_only_computes

if TYPE_CHECKING:
    from backpack_firstorder.divisors import divisors_of as divisors_of
    from backpack_firstorder.projections import Projection as Projection
    from backpack_firstorder.sample_gradients import SampleGradients as SampleGradients

# Loaded on demand, so that the entry point of an extension imports its own module only.
_PUBLIC = {
    "Projection": "projections",
    "SampleGradients": "sample_gradients",
    "divisors_of": "divisors",
}
__all__ = ["Projection", "SampleGradients", "divisors_of"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    return value


declare_only_computes(__name__)
