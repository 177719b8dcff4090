"""Groups of extensions that share a propagator.

One quantity travels for each group, however many extensions read from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from backpack_core.contract.extension import Extension
from backpack_core.contract.propagator import Propagator
from backpack_core.plugins.registry import registry

Watch = Callable[..., Any]  # called with a module, a class, a word, a function and its arguments


class Group(NamedTuple):
    """Extensions that share a propagator; a *lane* is the index of a group in the list of groups.

    Attributes:
        propagator: What travels for all of them.
        extensions: The extensions, in the order they were given.
        needs: The operations that the extensions will ask of a product.
        has_overrides: Whether carriers other than layer rules may answer for some modules.
        watch: Calls functions in order to measure their time; ``None`` if nothing is measured.
    """

    propagator: Propagator
    extensions: tuple[Extension, ...] = ()
    needs: frozenset[Any] = frozenset()
    has_overrides: bool = False
    watch: Watch | None = None

    @property
    def first(self) -> Extension | None:
        """The extension that error messages name."""
        return self.extensions[0] if self.extensions else None


def group(
    extensions: tuple[Extension, ...], watch: Watch | None = None
) -> tuple[tuple[Group, ...], tuple[Extension, ...]]:
    """Group extensions with equal propagators; one with carriers of its own is a group by itself.

    Args:
        extensions: What was asked for.
        watch: See :class:`Group`.

    Returns:
        The groups, and the extensions that belong to none: they read the graph as a whole.

    Raises:
        PluginConflictError: Several plugins provide a propagator of the same name.
    """
    together: dict[tuple[Propagator, int | None], list[Extension]] = {}
    for extension in extensions:
        if not extension.is_whole:
            registry.refuse_rivals(type(extension.propagator))
            is_alone = bool(extension.carriers) or registry.has_overrides(type(extension))
            key = extension.propagator, id(extension) if is_alone else None
            together.setdefault(key, []).append(extension)
    groups = []
    for (propagator, alone), group in together.items():
        needs = frozenset().union(*[extension.needs for extension in group])
        serving = propagator.serving(tuple(group))
        groups.append(Group(serving, tuple(group), needs, alone is not None, watch))
    return tuple(groups), tuple([e for e in extensions if e.is_whole])
