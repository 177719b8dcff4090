"""More than the gradient during ``loss.backward()``: a small core, and plugins for everything else.

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

model, lossfunc = extend(model), extend(lossfunc)
loss = lossfunc(model(X), y)
with backpack(DiagGGNExact()):
    loss.backward()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from backpack_core import errors as errors  # which modules of this package import from here

__version__ = "0.1.0"

if TYPE_CHECKING:
    from backpack_core.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # Names are loaded when they are asked for: pytest imports this package in every run in which it
    # is installed, which must not cost the seconds that importing torch takes.
    if name == "__all__":
        return [known for known in __dir__() if not known.startswith("_")]
    if name.startswith("_") or name not in vars(import_module("backpack_core.api")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module("backpack_core.api"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *vars(import_module("backpack_core.api"))})
