"""Results that have a row for each column, if columns arrive in chunks.

To append every chunk to the rows before it would copy these each time. Columns know which part of
all columns they are, so the first chunk makes memory for all of them once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backpack_core.contract.extension import Extension
from backpack_products import SampleProduct
from backpack_products.columns import Part
from backpack_products.operations import dense


@dataclass(eq=False)
class Rows:
    """Rows ``[v, N, *θ]`` of some columns.

    Attributes:
        mat: The rows.
        part: Which part of all columns they belong to.
        memory: ``[V, N, *θ]``, for all rows; held with the first rows.
    """

    mat: Tensor
    part: Part
    memory: Tensor | None = None


def rows_of(product: SampleProduct) -> Tensor | Rows:
    """``M`` itself, ``[V, N, *θ]``; for a chunk of columns, with its place among all rows."""
    mat = dense(product)
    parts = [root.part for root in product.roots]
    if len(parts) != 1 or parts[0] is None or parts[0].stop - parts[0].start != len(mat):
        return mat
    return Rows(mat, parts[0])


def stored(value: Tensor | Rows, extension: Extension, parameter: Tensor) -> Tensor | Rows:
    """Rows in the dtype of results; the first ones in memory for all."""
    if isinstance(value, Tensor):
        return value
    mat = value.mat.to(extension.dtype_for(parameter))
    if value.part.start:
        return Rows(mat, value.part)
    memory = mat.new_empty(value.part.total, *mat.shape[1:])
    memory[: len(mat)] = mat
    return Rows(memory[: len(mat)], value.part, memory)


def joined(first: Tensor | Rows, second: Tensor | Rows) -> Tensor | Rows:
    """Rows one after the other; a tensor as soon as all have arrived.

    Rows of several losses have no common numbering. They are concatenated.
    """
    if isinstance(first, Rows) and isinstance(second, Rows) and first.memory is not None:
        before, after = first.part, second.part
        if before.of is after.of and before.stop == after.start:
            first.memory[after.start : after.stop] = second.mat
            if after.stop == after.total:
                return first.memory
            part = before._replace(stop=after.stop)
            return Rows(first.memory[: after.stop], part, first.memory)
    return torch.cat([value.mat if isinstance(value, Rows) else value for value in (first, second)])
