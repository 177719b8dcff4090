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

from backpack_core import errors as errors  # modules of this package import it from here

__version__ = "0.1.0"

if TYPE_CHECKING:
    from backpack_core.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        # Public names are imported lazily. Pytest imports this package wherever it is installed,
        # which must not take the seconds that importing torch takes.
        if name == "__all__":
            return [public for public in __dir__() if not public.startswith("_")]
        public = {} if name.startswith("_") else vars(import_module("backpack_core.api"))
        if name not in public:  # tools that ask whether a name exists expect this error
            near = errors.nearest(name, public)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}", name=name)
        return globals().setdefault(name, public[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *vars(import_module("backpack_core.api"))})
