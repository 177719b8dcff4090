"""Links to the manuals of PyTorch and Python, without a network.

Sphinx would fetch an inventory of them. The addresses follow from the names, so plain links do.
"""

from __future__ import annotations

import builtins
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

TORCH = "https://docs.pytorch.org/docs/stable"
PYTHON = "https://docs.python.org/3/library"
_TENSORS = ("torch.Tensor", "Tensor")


def address(target: str) -> str | None:
    """Where the manual of a name of PyTorch or Python is, if it is one of those."""
    if target in _TENSORS:
        return f"{TORCH}/tensors.html#torch.Tensor"
    if target.startswith(("torch.", "nn.")):
        full = target if target.startswith("torch.") else f"torch.{target}"
        return f"{TORCH}/generated/{full}.html"
    name = target.rpartition(".")[2]
    if isinstance(getattr(builtins, name, None), type) and target in {name, f"builtins.{name}"}:
        page = "exceptions" if issubclass(getattr(builtins, name), BaseException) else "functions"
        return f"{PYTHON}/{page}.html#{name}"
    return None


def _resolve(app: Sphinx, env: Any, node: Any, contnode: nodes.Node) -> nodes.reference | None:
    if node.get("refdomain") != "py":
        return None
    found = address(node.get("reftarget", ""))
    return nodes.reference("", "", contnode, internal=False, refuri=found) if found else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Listen for references that nobody resolved."""
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
