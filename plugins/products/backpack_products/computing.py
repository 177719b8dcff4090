"""Which packages of plugins promise that their code computes, and does nothing else.

Then a library may record what it computes once, and repeat that without calling it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_ONLY_COMPUTING: Final = {"backpack_core"}


def declare_only_computes(package: str) -> None:
    """Declare that rules, extensions and propagators of a package only compute tensors.

    Their results depend only on their arguments and their own plain attributes. So a library may
    run the same operations again in a later pass without calling them. Anything else that they do,
    such as counting or printing, then does not happen.

    Args:
        package: The top-level package; classes derived elsewhere belong to that other package.
    """
    _ONLY_COMPUTING.add(package)


def only_computes(part: Callable[..., Any]) -> bool:
    """Whether :func:`declare_only_computes` was called for its package, and it calls no others."""
    home = None if getattr(part, "calls_others", False) else part.__module__.partition(".")[0]
    return home in _ONLY_COMPUTING
