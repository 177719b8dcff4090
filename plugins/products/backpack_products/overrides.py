"""Which function stands in for the layer rule of an extension at a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module

from backpack_core._torch import class_of
from backpack_core.contract.extension import Extension
from backpack_core.plugins.registry import has_methods, is_named, registry
from backpack_core.preferences import choose, qualified_name
from backpack_products.sameness import Name, attributes_behind, is_patched, same_maps


def override(extension: Extension, module: Module) -> Callable[..., Any] | None:
    """The function that makes a carrier for an extension at a module: its own, or a plugin's.

    A plugin's function is used for the same modules as a rule for its module type. An
    instance's own function is not used for subclasses.
    """
    own = class_of(module)
    kinds = [k for k in same_maps(own) if not _has_other(module, own, attributes_behind(k))]
    for kind in kinds[:1]:
        if kind in extension.carriers:
            return extension.carriers[kind]
    for kind in kinds:
        for (extension_type, key), claims in [*registry.overrides.items()]:
            if isinstance(extension, extension_type) and is_named(key, kind):
                name = f"{extension_type.__name__}/{qualified_name(kind)}"
                chosen: Callable[..., Any] = choose(claims, name, "pair override for").value
                return chosen
    return None


def _has_other(module: Module, kind: type[Module], behind: Mapping[Name, Any]) -> bool:
    return is_patched(kind, behind) or has_methods(module, behind)
