"""The pluggy manager of all plugins, and its hooks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import pluggy

from backpack_core.plugins import hookspecs
from backpack_core.plugins.hookspecs import PROJECT
from backpack_core.plugins.registry import registry

manager: Final = pluggy.PluginManager(PROJECT)
manager.add_hookspecs(hookspecs)
hooks: Final = manager.hook


def answer(hook: str) -> Any:
    """What the library that answers a hook returns; it is asked again when plugins have changed."""
    return _answer(hook, registry.generation)


@lru_cache(maxsize=4)
def _answer(hook: str, generation: int) -> Any:
    return getattr(hooks, hook)()
