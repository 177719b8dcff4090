"""The pluggy manager of all plugins, and its hooks."""

from __future__ import annotations

from typing import Final

import pluggy

from backpack_core.plugins import hookspecs
from backpack_core.plugins.hookspecs import PROJECT

manager: Final = pluggy.PluginManager(PROJECT)
manager.add_hookspecs(hookspecs)
hooks: Final = manager.hook
