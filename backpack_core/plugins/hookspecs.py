"""Everything a plugin may do, as pluggy hook specifications; these docstrings are the reference.

A plugin is any object that an entry point of the group ``backpack`` names. It is a class derived
from one of core's base classes, which counts as the only one that its hook returns, or a module
with functions marked by ``hookimpl``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pluggy
from torch.nn import Module

from backpack_core.contract.carrier import CarrierOf
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
    """Return layer-rule classes; each names its layers in ``module_types``."""


@hookspec
def backpack_extensions() -> Iterable[type[Extension]]:  # type: ignore[empty-body]
    """Return extension classes; users import them from ``backpack_core.extensions`` by name."""


@hookspec
def backpack_propagators() -> Iterable[type[Propagator]]:  # type: ignore[empty-body]
    """Return propagator classes: what travels backwards, and how it starts at a loss."""


@hookspec
def backpack_pair_overrides() -> Iterable[  # type: ignore[empty-body]
    tuple[type[Extension], type[Module] | str, CarrierOf]
]:
    """Return ``(extension class, module type, function)`` for pairs that replace the layer rule.

    The function is called with the extension and a propagator, and makes a :class:`Carrier`.
    """


@hookspec(firstresult=True)
def backpack_operation() -> Any:
    """Return the class, derived from ``engine.between.Between``, that knows what is between calls.

    Asked when plugins change. A class stands for all graphs, since a walk that has met an operation
    would have to begin anew in other hands.
    """


@hookspec
def backpack_run(run: Any) -> Observer | None:
    """Return an observer of one backward pass, or ``None``; called when that begins.

    ``run`` is the pass, of which nothing is known but what was asked for.
    """


@hookspec(firstresult=True)
def backpack_watch() -> Any:
    """Return what a block calls functions through that take time, so that it can be measured.

    An object that is called with a module, a class, a word, a function and its arguments; its
    method ``summary(history)`` makes what ``block.summary()`` returns.
    """


@hookspec(firstresult=True)
def backpack_storage() -> Storage | None:
    """Return where tensors of a call are kept that torch itself does something with.

    Called when the plugin is registered; core asks the object from then on.
    """
