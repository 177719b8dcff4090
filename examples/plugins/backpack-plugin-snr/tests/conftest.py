"""The tests run with the families and this plugin alone, whatever else is installed."""

from backpack_core.testing import only_plugins

only_plugins("backpack-plugin-snr")
