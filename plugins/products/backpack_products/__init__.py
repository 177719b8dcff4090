"""Products for backpack-core plugins: columns, and forms of individual Jacobians."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from backpack_core.errors import add_library_folder
from backpack_products.computing import declare_only_computes

if TYPE_CHECKING:
    from backpack_products.api import *  # noqa: F403

add_library_folder(__file__)


def __getattr__(name: str) -> Any:
    # Loaded on demand, so that importing one module of this package does not import all.
    is_public = name == "__all__" or name[:1].isupper()
    public = vars(import_module("backpack_products.api")) if is_public else {}
    if name == "__all__":
        return [each for each in public if each[:1].isupper()]
    if name not in public:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = public[name]
    return public[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *vars(import_module("backpack_products.api"))})


declare_only_computes(__name__)
