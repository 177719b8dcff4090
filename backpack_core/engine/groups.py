"""Groups of extensions that share a propagator, and thus one quantity in a backward pass.

Everything that travels is sent once for each group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from backpack_core.contract.extension import Extension
from backpack_core.contract.graph_extension import GraphExtension
from backpack_core.contract.propagator import Propagator
from backpack_core.plugins.registry import registry

Watch = Callable[..., Any]  # called with a module, a class, a way, a function and its arguments


class Group(NamedTuple):
    """Extensions that share a propagator; a *lane* is the index of a group in the list of groups.

    Attributes:
        propagator: What travels for all of them.
        extensions: The extensions, in the order they were given.
        needs: The operations that they will ask of a product.
        has_overrides: Whether carriers other than layer rules may speak for some modules.
        watch: Calls whatever takes time, if anybody measures that.
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
) -> tuple[tuple[Group, ...], tuple[GraphExtension, ...]]:
    """Group extensions with equal propagators, but leave one alone that has carriers of its own.

    Args:
        extensions: What was asked for.
        watch: What the groups call functions through, if anything.

    Returns:
        The groups, and apart from them what reads the loss as a whole.

    Raises:
        PluginConflictError: Several plugins provide a propagator of one name.
    """
    groups: dict[object, Group] = {}
    for extension in extensions:
        if isinstance(extension, GraphExtension):
            continue
        registry.refuse_rivals(type(extension.propagator))
        alone = bool(extension.carriers) or registry.has_overrides(type(extension))
        key = (extension.propagator, id(extension) if alone else None)
        known = groups.get(key, Group(extension.propagator, has_overrides=alone, watch=watch))
        groups[key] = known._replace(
            extensions=(*known.extensions, extension), needs=known.needs.union(extension.needs)
        )
    found = [g._replace(propagator=g.propagator.serving(g.extensions)) for g in groups.values()]
    return tuple(found), tuple(e for e in extensions if isinstance(e, GraphExtension))
