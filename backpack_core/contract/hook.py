"""The mark of an implementation of a hook: base classes carry it for those who derive from them."""

from __future__ import annotations

import pluggy

PROJECT = "backpack"

hookimpl = pluggy.HookimplMarker(PROJECT)
