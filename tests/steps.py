"""Verifies every step of a pass: shapes, dtypes and owners of what is sent, and of what is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from backpack_core.engine.schedule import Schedule
from backpack_core.record.call import Edge
from backpack_operations.operands import FactoredColumns
from backpack_operations.sink import SharedSink
from backpack_products.columns import ApartColumns, Columns


class NotAsItHasToBe(BaseException):
    """Something that was sent or read is wrong; no handler takes it for an error of a plugin's."""


_leave, _note = Schedule.leave, SharedSink.note


def switch_on() -> None:
    """Verify in all passes of this process from now on."""
    Schedule.leave = _verified_leave  # type: ignore[method-assign]
    SharedSink.note = _verified_note  # type: ignore[method-assign]


def switch_off() -> None:
    """Verify nothing, as where calls of functions are counted."""
    Schedule.leave, SharedSink.note = _leave, _note  # type: ignore[method-assign]


def _verified_leave(
    schedule: Schedule, lane: int, edge: Edge, wide: Any = None, own: Any = None
) -> None:
    for quantity, see in ((wide, _see_wide), (own, _see_own)):
        if isinstance(quantity, Columns) and not edge.level:
            for mat in _blocks(quantity).values():
                see(schedule, edge, mat, isinstance(quantity, ApartColumns))
    _leave(schedule, lane, edge, wide, own)


def _blocks(quantity: Columns) -> Mapping[Any, Tensor]:
    """The columns; formed for this look alone, or no parameter would be read in factors."""
    if not isinstance(quantity, FactoredColumns) or "blocks" in vars(quantity):
        return quantity.blocks
    products = [p for some in quantity.products.values() for p in some]
    products += [part for p in products for part in getattr(p, "parts", ())]
    before = [{*p.results} for p in products]
    blocks = quantity.blocks
    del vars(quantity)["blocks"]
    for product, known in zip(products, before, strict=True):
        for key in product.results.keys() - known:
            del product.results[key]
    return blocks


def _see(is_right: bool, *what: object) -> None:
    if not is_right:
        raise NotAsItHasToBe(*what)


def _see_wide(schedule: Schedule, edge: Edge, mat: Tensor, is_apart: bool) -> None:
    """Columns for the whole batch: ``[V, *]`` at a tensor ``[*]``, or ``[V, N, *]`` if apart."""
    metadata, samples = edge.node._input_metadata[edge.output_nr], schedule.survey.batch_size
    rest = mat.shape[2:] if is_apart else mat.shape[1:]
    _see(rest == torch.Size(metadata.shape), "shape", mat.shape, metadata.shape)
    _see(not is_apart or mat.shape[1] == samples, "samples", mat.shape, samples)
    _see(mat.dtype == metadata.dtype, "dtype", mat.dtype, metadata.dtype)


def _see_own(schedule: Schedule, edge: Edge, mat: Tensor, is_apart: bool) -> None:
    """Columns for the samples that take part: ``[V, *]``, with these on the axis of samples."""
    shape = list(edge.node._input_metadata[edge.output_nr].shape)
    found, site = [*mat.shape[2 if is_apart else 1 :]], schedule.survey.site_at(edge)
    if not is_apart:
        axis = 0 if site is None else schedule.survey.axis_and_positions(site)[0]
        del shape[axis], found[axis]
    _see(found == shape, "shape", mat.shape, shape)


def _verified_note(
    sink: SharedSink, lane: int, group: Any, view: Any, trained: Any, readings: Any
) -> None:
    """A reading is of the parameter's shape, and of a parameter that the survey knows."""
    for own, reading in zip(trained, readings, strict=True):
        shape = torch.Size(getattr(reading, "shape", own.parameter.shape))
        _see(id(own.parameter) in sink.survey.uses, "owner", own.name)
        _see(shape == own.parameter.shape, "shape", own.name, shape)
    _note(sink, lane, group, view, trained, readings)
