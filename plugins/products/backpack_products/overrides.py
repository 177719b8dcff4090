"""Which function stands in for the layer rule of an extension at a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from backpack_core._torch import class_of
from backpack_core.contract.extension import Extension
from backpack_core.discovery import choose, qualified_name
from backpack_core.plugins.registry import is_named, registry
from backpack_products.sameness import attributes_behind, has_other, same_maps


def override(extension: Extension, module: Module) -> Callable[..., Any] | None:
    """The function that makes a carrier for an extension at a module: its own, or a plugin's.

    A plugin's function is used for the same modules as a rule for its module type. An
    instance's own function is not used for subclasses.
    """
    kinds = [k for k in same_maps(class_of(module)) if not has_other(module, attributes_behind(k))]
    for kind in kinds[:1]:
        if kind in extension.carriers:
            return extension.carriers[kind]
    for kind in kinds:
        for (extension_type, key), claims in [*registry.overrides.items()]:
            if isinstance(extension, extension_type) and is_named(key, kind):
                name = f"{extension_type.__name__}/{qualified_name(kind)}"
                chosen: Callable[..., Any] = choose(claims, name, "pair override").value
                return chosen
    return None
