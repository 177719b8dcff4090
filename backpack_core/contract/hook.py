"""The marker of hook implementations; base classes carry them for the classes derived from them.

In a file of its own, since the contract must not import the registry.
"""

from __future__ import annotations

import pluggy

PROJECT = "backpack"

hookimpl = pluggy.HookimplMarker(PROJECT)
