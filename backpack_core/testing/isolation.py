"""Tests of a package run with the plugins that they need, whatever else is installed."""

from __future__ import annotations

import os

from backpack_core import plugins

FAMILIES = ("backpack-plugin-layers", "backpack-plugin-firstorder", "backpack-plugin-secondorder")


def only_plugins(*names: str) -> None:
    """Load the families and the named plugins in this process, and no others.

    To be called at the top of ``tests/conftest.py``. The environment variable
    ``BACKPACK_LOAD_PLUGINS``, where it is set, is stronger: ``BACKPACK_LOAD_PLUGINS=a,b pytest``
    tries a package beside others.

    Args:
        names: Names of distributions or of entry points.
    """
    if "BACKPACK_LOAD_PLUGINS" not in os.environ:
        os.environ["BACKPACK_LOAD_PLUGINS"] = ",".join((*FAMILIES, *names))
        plugins.reset()
