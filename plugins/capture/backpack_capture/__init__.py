"""Captured steps for backpack-core: a training step as one recorded graph, without the engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from backpack_core.errors import add_library_folder

if TYPE_CHECKING:
    from backpack_capture.entry import capture as capture
    from backpack_capture.hosted import Host as Host
    from backpack_capture.hosted import HostedStep as HostedStep
    from backpack_capture.hosted import Make as Make
    from backpack_capture.step import CapturedStep as CapturedStep
    from backpack_capture.step import CaptureWarning as CaptureWarning

# Loaded on demand, so that an import of this package for every pass stays cheap.
_PUBLIC = {
    "CaptureWarning": "step",
    "CapturedStep": "step",
    "Host": "hosted",
    "HostedStep": "hosted",
    "Make": "hosted",
    "capture": "entry",
}
__all__ = ["CaptureWarning", "CapturedStep", "Host", "HostedStep", "Make", "capture"]

add_library_folder(__file__)  # warnings point at the line that calls a step


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    return found
