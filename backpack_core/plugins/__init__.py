"""Plugins: what they may provide, how they are loaded, and which of them has the rule for a module.

Each plugin is loaded and registered separately, so that a failing one does not break the others.
"""

from backpack_core.plugins.loading import ensure_loaded as ensure_loaded
from backpack_core.plugins.loading import failures as failures
from backpack_core.plugins.loading import known_plugins as known_plugins
from backpack_core.plugins.loading import load as load
from backpack_core.plugins.loading import load_all as load_all
from backpack_core.plugins.registration import API_VERSION as API_VERSION
from backpack_core.plugins.registration import hook_names as hook_names
