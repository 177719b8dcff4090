"""Names of autograd nodes for messages, and the error for a node that cannot be crossed."""

from __future__ import annotations

import re

from backpack_core._torch import LeafNode, Node
from backpack_core.errors import BridgeError, is_library

_GIVE_IT_A_RULE = "Move the operation into a module and give it a layer rule."


def is_leaf(node: Node) -> bool:
    """Whether a node accumulates the gradient of a leaf, such as a parameter."""
    return type(node) is LeafNode


def name_of(node: Node) -> str:
    """The name of a node's operation: ``"Mul"`` for ``MulBackward0``."""
    return re.sub(r"Backward\d*$", "", node.name().rsplit("::", 1)[-1])


def described(node: Node) -> str:
    """The name of the operation, with the user's line if anomaly mode has recorded it."""
    steps = node.metadata.get("traceback_") or ()  # type: ignore[attr-defined]
    for step in reversed(steps):
        match = re.match(r'\s*File "(.+)", line (\d+)', step)
        if match and not is_library(match[1]):
            return f"{name_of(node)} [{match[1]}:{match[2]}]"
    return name_of(node)


def refuse(node: Node, reason: str, advice: str = _GIVE_IT_A_RULE) -> BridgeError:
    """The error for a node that cannot be crossed."""
    error = BridgeError(
        f"Cannot carry the quantity through the operation {name_of(node)!r} ({node.name()}) "
        f"between two modules: {reason}. {advice}"
    )
    error.node = node
    return error
