"""Everything that a plugin may provide, as pluggy hook specifications with their reference.

A plugin is the object that an entry point of the group ``backpack`` names. It is either a class
derived from one of the core's base classes, as its hook would return it, or a module with functions
marked by ``hookimpl``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import pluggy
from torch.nn import Module

from backpack_core.contract.extension import Extension
from backpack_core.contract.observer import Observer
from backpack_core.contract.propagator import Propagator
from backpack_core.contract.rules import LayerRule
from backpack_core.record.storage import Storage

PROJECT = "backpack"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

# Called in passes, by libraries' own objects; the others say once what a plugin contributes.
OF_PASSES: Final = frozenset(
    {"backpack_operation", "backpack_run", "backpack_watch", "backpack_storage"}
)


@hookspec
def backpack_layer_rules() -> Iterable[type[LayerRule]]:  # type: ignore[empty-body]
    """Return layer-rule classes; each names the module types that it is for in ``module_types``."""


@hookspec
def backpack_extensions() -> Iterable[type[Extension]]:  # type: ignore[empty-body]
    """Return extension classes; users import them from ``backpack_core.extensions`` by name."""


@hookspec
def backpack_propagators() -> Iterable[type[Propagator]]:  # type: ignore[empty-body]
    """Return propagator classes: what travels backwards, and how it starts at a loss."""


@hookspec
def backpack_pair_overrides() -> Iterable[  # type: ignore[empty-body]
    tuple[type[Extension], type[Module] | str, Callable[..., Any]]
]:
    """Return ``(extension class, module type, function)`` for pairs that bypass the layer rule.

    The function is called with the extension and a propagator, and makes a
    :class:`~backpack_operations.carrier.Carrier`.
    """


@hookspec(firstresult=True)
def backpack_operation() -> Any:
    """Return the class, derived from ``engine.between.Between``, for operations between calls.

    Called when plugins change. The class serves every graph, even one without operations between
    calls. Only a walk shows whether a graph has them, and another class would need a second walk.
    """


@hookspec
def backpack_run(run: Any) -> Observer | None:
    """Return an observer of a backward pass, or ``None``; called when the pass begins.

    ``run`` is the pass, before its graph is surveyed.
    """


@hookspec(firstresult=True)
def backpack_watch() -> Any:
    """Return a class that measures functions: blocks call functions through its instances.

    Each block has one. It is called with a module, a class, a word for the phase, a function and
    its arguments. Its method ``summary(history)`` makes what ``block.summary()`` returns. The hook
    is called when plugins change.
    """


@hookspec(firstresult=True)
def backpack_storage() -> Storage | None:
    """Return the storage of tensors that torch itself packs, shards or computes.

    Called once, when the plugin is registered; the core asks the object from then on.
    """
