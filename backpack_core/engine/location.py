"""Adds to an error where it happened: module, extension, and who provided them."""

from __future__ import annotations

from backpack_core._torch import Node
from backpack_core.contract.extension import Extension
from backpack_core.errors import BackpackError, BridgeError
from backpack_core.graph.paths import sources
from backpack_core.graph.survey import Survey
from backpack_core.plugins.registry import registry
from backpack_core.record.view import View


def place(error: Exception, view: View, extension: Extension | None) -> None:
    """Say at which call."""
    rule = f"{type(view.call.rule).__name__} of {view.call.provenance}"
    _place(error, extension, f", at {view.path}, rule {rule}")


def place_between(
    error: Exception, survey: Survey, extension: Extension | None, node: Node | None = None
) -> None:
    """Say behind which modules an operation between them stands, as far as it is known.

    Args:
        error: The error.
        survey: What is known about the graph.
        extension: The extension.
        node: The operation; ``None`` if the error says.
    """
    at = error.node if node is None and isinstance(error, BridgeError) else node
    paths = [] if at is None else sources(survey, at)
    _place(error, extension, f", after {', '.join(paths)}" if paths else "")


def _place(error: Exception, extension: Extension | None, where: str) -> None:
    """Say it once: the innermost place counts."""
    if getattr(error, "backpack_context", None) is not None:
        return
    who = "no extension" if extension is None else registry.describe(extension)
    text = error.backpack_context = f"[{who}{where}]"  # type: ignore[attr-defined]
    if isinstance(error, BackpackError):
        error.args = (f"{error.args[0] if error.args else ''}\n{text}", *error.args[1:])
    elif hasattr(error, "add_note"):
        error.add_note(text)
