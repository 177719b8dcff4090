"""What users say about samples and terms: ``batch_axis``, ``samples`` and ``beside``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from backpack_core._torch import Node
from backpack_core.errors import UsageError
from backpack_core.record.call import edge_of
from backpack_operations.told import Told, told


def said(samples: Any, beside: Any) -> tuple[Told | None, frozenset[tuple[Node, int]]]:
    """Check ``backpack(samples=..., beside=...)``; see :class:`Between`."""
    return None if samples is None else told(samples), _edges_of(beside)


def _edges_of(beside: object) -> frozenset[tuple[Node, int]]:
    if not isinstance(beside, Sequence):
        raise UsageError(f"beside takes a list of terms: beside=[term]. Got {beside!r}.")
    edges = [edge_of(term) if isinstance(term, Tensor) else None for term in beside]
    if None in edges:
        raise UsageError(
            "beside=[...] takes terms of the loss: tensors that were computed from parameters, and "
            f"that backward() will meet. Got {beside[edges.index(None)]!r}."
        )
    return frozenset((edge.node, edge.output_nr) for edge in edges if edge is not None)


def axes_of(module: Module, given: int | Mapping[str, int]) -> dict[str, int]:
    """Check ``extend(batch_axis=...)``; see :class:`Between`."""
    axes: dict[str, int] = {**given} if isinstance(given, Mapping) else {"": given}
    paths = {path for path, _ in module.named_modules()}
    for path, axis in axes.items():
        if path not in paths or isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
            raise UsageError(
                "batch_axis is the number of an axis, from 0, or a mapping from paths of modules "
                f"of the model to such numbers. Got {axis!r} for {path!r}"
                f"{'.' if path in paths else ', which names no module.'}"
            )
    return {} if not any(axes.values()) else axes
