"""Several plugins that claim one key: which of them counts, and the error where none is preferred.

A key is the name of a plugin or an extension, or the qualified name of a class with a rule. Users
say what they prefer by :func:`backpack_core.prefer`, or by the environment.

This module imports neither plugins nor torch, as ``discovery.py``.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from backpack_core.errors import PluginConflictError

T = TypeVar("T")


class Provenance(NamedTuple):
    """The origin of a contribution.

    Attributes:
        plugin: Name of the entry point, or of the object that was registered by hand.
        distribution: Name of the installed distribution; empty for one registered by hand.
        version: Its version.
    """

    plugin: str
    distribution: str = ""
    version: str = ""

    @property
    def names(self) -> set[str]:
        """The normalised names by which users may mean it: of the plugin, and the distribution."""
        return {canonical(name) for name in self[:2] if name}

    def __str__(self) -> str:
        """As ``"backpack-plugin-scale 0.1"``."""
        if not self.distribution:
            return f"{self.plugin!r} (registered by hand)"
        return f"{self.distribution} {self.version}".rstrip()


@dataclass(frozen=True)
class Claim(Generic[T]):
    """A plugin's contribution under a key (a module type, the name of an extension)."""

    value: T
    provenance: Provenance


# Preferred distributions by key, as :func:`backpack_core.prefer` sets them.
preferred: dict[str, str] = {}


def preference(key: str) -> str:
    """The preferred distribution for a key, or an empty string.

    It is set by :func:`backpack_core.prefer`, or by ``BACKPACK_PREFER="key=distribution,..."``; the
    key ``*`` stands for all others.
    """
    pairs = [p.strip().rsplit("=", 1) for p in os.environ.get("BACKPACK_PREFER", "").split(",")]
    environment = {qualified_name(pair[0]): pair[1] for pair in pairs if len(pair) == 2}
    tables = preferred, environment
    return next(filter(None, (t.get(name) for name in (key, "*") for t in tables)), "")


def choose(claims: list[Claim[T]], key: str, what: str) -> Claim[T]:
    """The only claim on a key, or the preferred one of several.

    Args:
        claims: All claims on the key.
        key: The key, as :func:`backpack_core.prefer` takes it.
        what: What is claimed, as the message puts it before the key.

    Raises:
        PluginConflictError: There are several, and none is preferred.
    """
    wanted = preference(key)
    is_one = len(claims) == 1
    chosen = claims if is_one else [c for c in claims if canonical(wanted) in c.provenance.names]
    if len(chosen) == 1:
        return chosen[0]
    who = sorted((claim.provenance for claim in claims), key=str)
    first = who[0].distribution or who[0].plugin
    undecided = f" ({wanted!r} is preferred, which does not tell them apart.)" if wanted else ""
    raise PluginConflictError(
        f"Several plugins claim the {what} {key!r}: {' and '.join(map(str, who))}.{undecided} "
        f"Uninstall all but one, call backpack_core.prefer({first!r}, {key!r}), or set "
        f"BACKPACK_PREFER={key}={first}."
    )


def canonical(name: str) -> str:
    """The normalised name of a distribution or plugin, as package indexes write it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def names_in(text: str) -> set[str]:
    """The normalised names in a list with commas."""
    return {canonical(name) for name in text.split(",") if name.strip()}


def qualified_name(key: str | type) -> str:
    """The qualified name of a class, which may be named by an alias such as ``torch.nn.Linear``."""
    kind = key if isinstance(key, type) else imported_class(key)
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(key)


def imported_class(name: str) -> Any:
    """The class with a qualified name; ``None`` if its module is not imported."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)
