"""Products in factors for parameters that are operands of torch's functions.

The other factor is the tensor that autograd saved, see ``backpack_operations.operands``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backpack_operations import bridge, nodes
from backpack_operations.operands import Operand, products_at
from backpack_products import (
    AffineProduct,
    DenseProduct,
    LookupProduct,
    SampleProduct,
    ScaleProduct,
)
from backpack_products.scale import TableProduct


@products_at("Mm", "Bmm", "Addmm")
def _of_matrices(operand: Operand, mat: Tensor) -> SampleProduct | None:
    """The product at an operand of ``out = a b``, also batched; rows or columns are positions."""
    node, position, shape, is_apart = operand
    names = ("_saved_self", "_saved_mat2")
    if nodes.operation_of(node) == "Addmm":
        names, position = ("_saved_mat1", "_saved_mat2"), position - 1
        mat = _times(mat, node._saved_beta if position < 0 else node._saved_alpha)
    if mat.dim() != (4 if nodes.operation_of(node) == "Bmm" else 3):
        return None  # a view of the output was changed in place, and replaces it
    if position < 0:
        return _of_bias(mat, shape)
    if not is_apart and (position == 0 or mat.dim() > 3):
        return None  # axis 0 of the output does not hold rows
    inp = getattr(node, names[1 - position])
    if inp.layout is not torch.strided:
        return None
    out, inp = (mat.mT, inp.mT) if position == 0 else (mat, inp)
    if inp.dim() == 2:
        out, inp = out.unsqueeze(1), inp.unsqueeze(0)
    out, inp = out.movedim(1, 2).unsqueeze(2), inp.transpose(0, 1).unsqueeze(1)
    if position == 0:  # [V, R, 1, G, O] and [R, 1, G, I]
        return AffineProduct(out, inp, shape)
    return AffineProduct(out, inp, shape, lambda m: m.mT.reshape(*m.shape[:-3], *shape))


@products_at("Add", "Sub")
def _of_sum(operand: Operand, mat: Tensor) -> SampleProduct | None:
    """The product at a vector that is added along the last axis."""
    node, position, shape, _ = operand
    sign = -1 if nodes.operation_of(node) == "Sub" else 1
    product = _of_bias(_times(mat, sign * node._saved_alpha) if position else mat, shape)
    return product or _of_rows(operand, mat)


def _of_bias(mat: Tensor, shape: torch.Size) -> SampleProduct | None:
    width = mat.shape[-1]
    if (shape[-1:], shape.numel()) != ((width,), width):
        return None
    return AffineProduct(mat.reshape(*mat.shape[:2], -1, 1, width), None, shape)


def _times(mat: Tensor, scale: float) -> Tensor:
    return mat if scale == 1 else mat * scale


@products_at("Mul")
def _of_gain(operand: Operand, mat: Tensor) -> SampleProduct | None:
    """The product at a gain along the last axes."""
    node, position, shape, _ = operand
    own = shape[next((axis for axis, n in enumerate(shape) if n != 1), len(shape)) :]
    other = node._saved_self if position else node._saved_other
    is_along = own and mat.shape[max(2, mat.dim() - len(own)) :] == own
    if not is_along or not isinstance(other, Tensor):  # a number
        return _of_rows(operand, mat)
    other = other.to(mat.dtype).expand(mat.shape[1:])
    out = mat.reshape(*mat.shape[:2], -1, own.numel())
    return ScaleProduct(out, other.reshape(len(other), -1, own.numel()), shape)


@products_at("Embedding", "Index")
def _of_table(operand: Operand, mat: Tensor) -> SampleProduct | None:
    """The product at a table ``[num, dim]`` whose rows were looked up."""
    node, _, shape, _ = operand
    row = node._saved_indices
    if nodes.operation_of(node) == "Index":
        if len(row) != 1 or row[0] is None or row[0].dtype == torch.bool:
            return None
        row = row[0] % shape[0]
    elif node._saved_padding_idx in range(shape[0]):  # -1 means no padding
        mat = mat * (row != node._saved_padding_idx).unsqueeze(-1)
    if len(shape) != 2 or mat.shape[1:] != (*row.shape, shape[1]):
        return None
    out = mat.reshape(*mat.shape[:2], -1, shape[1])
    return LookupProduct(out, row.reshape(len(row), -1), shape)


@products_at("Expand", "Repeat", *(nodes.ELEMENTWISE - {"Add", "Sub", "Mul"}))
def _of_rows(operand: Operand, mat: Tensor) -> SampleProduct | None:
    """The product at a broadcast operand: the gradient before autograd sums it to its shape."""
    node, position, shape, is_apart = operand
    missing = mat.dim() - 1 - len(shape)
    is_view = nodes.operation_of(node) in {"Expand", "Repeat"}
    is_same = is_view and mat.shape[1:] == shape  # as for a batch of one sample
    if (is_apart and not is_same) or not (missing or shape[:1] == (1,)):
        return None
    repeated = zip(reversed(mat.shape[1:]), reversed(shape), strict=False)
    if is_view and any(own not in (1, length) for length, own in repeated):
        return None  # several copies of the entries along an axis
    whole = mat if is_view else bridge.push_unsummed(node, {0: mat}).get(position)
    if whole is None or whole.shape != mat.shape:
        return None
    own = [1] * missing + list(shape)  # as broadcast, with samples in front
    axes = [1 + axis for axis, n in enumerate(own) if axis and n == 1 != whole.shape[1 + axis]]
    whole = whole.sum(axes) if axes else whole
    is_added = is_view or nodes.operation_of(node) in {"Add", "Sub"}
    if is_added and not axes and _is_table(shape):
        return TableProduct(whole.reshape(*mat.shape[:2], 1, shape.numel()), None, shape)
    return DenseProduct(whole.reshape(*mat.shape[:2], *shape))


def _is_table(shape: torch.Size) -> bool:
    """Whether a tensor has rows, and features along the last axis."""
    return len(shape) > 1 and max(shape[-2:]) < shape.numel() == shape[-2:].numel()
