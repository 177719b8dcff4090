"""Whose the entries are that an operation has picked: of a mask over tokens, say."""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_core._torch import Node
from backpack_core.graph import nodes
from backpack_core.graph.batch import is_doubtful
from backpack_core.graph.of_weights import OfWeights
from backpack_core.graph.paths import entries_of
from backpack_core.graph.survey import Survey, edges_behind
from backpack_core.record.call import Call

Nodes = OfWeights | frozenset[Node]


def owners_of_rows(
    node: Node | None, samples: int, of_loss: bool = False, tables: Nodes = frozenset()
) -> Tensor | None:
    """Which sample each entry of axis 0 was picked from; ``None`` if nothing is known of any.

    Samples lie one after the other on axis 0 of what they were picked from, each with one entry or
    several. Whatever comes behind has kept the rows.

    Args:
        node: The node of the tensor.
        samples: Number of samples.
        of_loss: Whether an extended loss received the tensor: its terms are those of its rows,
            which may be all of them, in another order, or merged.
        tables: Nodes of tensors that have no samples.
    """
    rows = 0 if node is None else nodes.shape_of(node, 0)[:1].numel()
    todo = [] if node is None else [node]
    while todo:
        this = todo.pop()
        if nodes.operation_of(this) in ("Index", "IndexSelect"):
            child, number = this.next_functions[0]
            if child is not None and not nodes.is_leaf(child) and child not in tables:
                shape = nodes.shape_of(child, number)
                owners = _owners_of_picked(_picked(this), shape, samples, of_loss)
                if owners is not None and not rows % len(owners):  # views may have merged more
                    return owners.repeat_interleave(rows // len(owners))
            continue
        for position, (child, number, _) in edges_behind(this):
            shape = nodes.shape_of(child, number)
            if child in tables or not nodes.keeps_rows(this, 0, position):
                continue
            if of_loss and rows > samples and shape[:1] == (samples,):
                own = torch.arange(samples).repeat_interleave(rows // samples)
                return None if is_doubtful(shape, samples) else own
            todo.append(child)
    return None


def _owners_of_picked(
    picked: Tensor | None, shape: torch.Size, samples: int, of_loss: bool
) -> Tensor | None:
    """The same for entries of a tensor of some shape."""
    if picked is None or not len(picked) or not shape[0] or shape[0] % samples:
        return None
    picked = picked % shape[0]
    if of_loss:
        is_unknown = samples > 1 and samples in shape[1:]  # they may lie there
    else:  # all in another order may be paired with other samples' targets
        is_unknown = len(picked) == shape[0] == len(picked.unique())
    return None if is_unknown else picked // (shape[0] // samples)


def turns_of(survey: Survey, loss: Call) -> Tensor:
    """In which turn each row that a loss received is a column: no two of a sample share one."""
    edge, rows = loss.edges[0], torch.arange(loss.stored.inputs[0].shape[0])
    node = edge.node if edge is not None and survey.is_readable else None
    owners = owners_of_rows(node, survey.batch_size, True, OfWeights(survey))
    if owners is None:
        return rows % entries_of(survey, loss)
    order, counts = owners.argsort(stable=True), owners.bincount()
    turns = torch.empty_like(owners)
    turns[order] = rows.to(owners.device) - (counts.cumsum(0) - counts)[owners[order]]
    return turns


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
    found = torch.broadcast_tensors(*indices)[0] if indices else None
    return None if found is None or found.shape != nodes.shape_of(node, 0)[:1] else found
