"""Whose the entries are that an operation has picked: of a mask over tokens, say."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph import nodes
from backpack_core.graph.survey import edges_behind


def owners_of_rows(node: Node | None, samples: int) -> Tensor | None:
    """Which sample each entry of axis 0 was picked from; ``None`` if nothing is known of any.

    Samples lie one after the other on axis 0 of what they were picked from, each with one entry or
    several. Whatever comes behind has kept the rows.

    Args:
        node: The node of the tensor.
        samples: Number of samples.
    """
    rows = 0 if node is None else nodes.shape_of(node, 0)[:1].numel()
    while node is not None and nodes.operation_of(node) not in ("Index", "IndexSelect"):
        kept = [e.node for i, e in edges_behind(node) if nodes.keeps_rows(node, 0, i)]
        node = kept[0] if kept else None
    child, number = (None, 0) if node is None else node.next_functions[0]
    if node is None or child is None:
        return None
    picked, length = _picked(node), nodes.shape_of(child, number)[0]
    if picked is None or picked.shape != nodes.shape_of(node, 0)[:1]:
        return None
    if not length or length % samples or not len(picked) or rows % len(picked):
        return None
    picked = picked % length
    # All in another order may be paired with other samples' targets.
    if len(picked) == length == len(picked.unique()):
        return None
    owners = picked // (length // samples)
    return owners.repeat_interleave(rows // len(picked))  # views may have merged more into them


def _picked(node: Node) -> Tensor | None:
    """Which entries of axis 0 were picked, one axis of them."""
    if nodes.operation_of(node) == "IndexSelect":
        index: Tensor = node._saved_index  # type: ignore[attr-defined]
        return None if node._saved_dim else index  # type: ignore[attr-defined]
    indices: list[Tensor] = []
    for given in node._saved_indices:  # type: ignore[attr-defined]
        if given is None:  # an axis that is kept
            break
        indices += given.nonzero(as_tuple=True) if given.dtype == torch.bool else [given]
    return torch.broadcast_tensors(*indices)[0] if indices else None
