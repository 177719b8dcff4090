"""Rules for the helper modules of ``backpack_layers.modules``.

``Parallel`` is a container and needs no rule.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from backpack_core.errors import UnsupportedError
from backpack_core.record.nested import iter_tensors
from backpack_core.record.view import View
from backpack_layers.linear_map import LinearMapRule
from backpack_layers.modules import Pad, Permute, ReduceTuple, ScaleModule, Slicing, SumModule
from backpack_products.derivatives import SecondOrderRule
from backpack_products.parametric import ParametricRule


class SumModuleRule(SecondOrderRule):
    """``y = Σ_i x_i``: every input receives the same columns."""

    module_types = (SumModule,)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor, ...]:
        return (mat,) * len(view.stored.inputs)


class ScaleModuleRule(ParametricRule):
    """``y = w x`` with one number ``w``."""

    module_types = (ScaleModule,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        weight = cast(ScaleModule, view.module).weight
        return mat * (view.parameter("weight") if isinstance(weight, Tensor) else weight)

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        size = view.input_shape[1:].numel()
        inputs = view.input.reshape(view.batch_size, size)
        columns = mat.reshape(*mat.shape[:2], size)
        return torch.einsum("vnd,nd->vn", columns, inputs).unsqueeze(-1)


class PermuteRule(SecondOrderRule):
    """``y = x`` with its axes rearranged, the batch axis first."""

    module_types = (Permute,)
    hessian_is_zero = True
    jacobian_is_constant = True

    def check(self, view: View) -> None:
        """Refuse permutations that move the batch axis."""
        order = _permutation(view)
        if order[0] != 0:
            raise UnsupportedError(
                f"{view.path} moves the batch axis (order of axes: {order}), but quantities of "
                "single samples need it first: leave axis 0 in its place."
            )

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        order = _permutation(view)
        return mat.permute(0, *(order.index(axis) + 1 for axis in range(len(order))))


def _permutation(view: View) -> tuple[int, ...]:
    return cast(Permute, view.module).permutation(len(view.input_shape))


class ReduceTupleRule(SecondOrderRule):
    """``y = x_k``: the columns go to the chosen element."""

    module_types = (ReduceTuple,)
    hessian_is_zero = True
    # It returns one of its inputs: the graph leads only to that one, not to the rest of the tuple.
    transparent = True

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        elements = view.args[0] if view.args else view.kwargs["input"]
        index = cast(ReduceTuple, view.module).index
        before = elements[: range(len(elements))[index]]
        chosen = sum(1 for _ in iter_tensors(tuple(before))) + view.index
        return tuple(mat if slot == chosen else None for slot in range(len(view.stored.inputs)))


class SlicingRule(LinearMapRule):
    """``y = x[index]``, where the index leaves the batch axis alone."""

    module_types = (Slicing,)

    def check(self, view: View) -> None:
        """Refuse indices that select or move samples."""
        if not _keeps_batch(_index(view), view.input_shape):
            raise UnsupportedError(
                f"{view.path} indexes with {view.module.slice_info!r}, which touches the batch "
                "axis, so its outputs are no longer the samples of its input: begin the index "
                "with a full slice, as in (slice(None), ...)."
            )

    def apply(self, view: View, x: Tensor) -> Tensor:
        """Index a tensor with any number of samples."""
        index = _index(view)
        if index and index[0] is not Ellipsis:
            index = (slice(None), *index[1:])
        return x[index]

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        index = _index(view)
        if any(map(_is_array, index)):  # an index array may name an entry twice
            return super()._jac_t_mat_prod(view, mat)
        product = mat.new_zeros(len(mat), *view.input_shape)
        product[(slice(None), *index)] = mat
        return product


def _index(view: View) -> tuple[Any, ...]:
    info = cast(Slicing, view.module).slice_info
    return info if isinstance(info, tuple) else (info,)


def _is_array(item: Any) -> bool:
    return not (item is None or item is Ellipsis or isinstance(item, (slice, int)))


def _axes_consumed(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    mask = isinstance(item, Tensor) and item.dtype in {torch.bool, torch.uint8}
    return item.dim() if mask else 1


def _keeps_batch(index: tuple[Any, ...], shape: torch.Size) -> bool:
    """Whether axis 0 of ``x[index]`` is axis 0 of ``x``.

    The index must start with a full slice, or an ellipsis that covers axis 0. No other index may
    separate two index arrays, because the axis that they make would move to the front.
    """
    arrays = [position for position, item in enumerate(index) if _is_array(item)]
    if any(isinstance(item, bool) for item in index) or (
        arrays and arrays[-1] - arrays[0] >= len(arrays)
    ):
        return False
    if not index:
        return True
    first = index[0]
    if first is Ellipsis:
        return len(shape) > sum(map(_axes_consumed, index))
    return isinstance(first, slice) and first.indices(shape[0]) == (0, shape[0], 1)


class PadRule(LinearMapRule):
    """``y`` is ``x`` with a border; constant borders receive nothing back, copies are summed."""

    module_types = (Pad,)

    def check(self, view: View) -> None:
        """Refuse padding of the batch axis."""
        batch = cast(Pad, view.module).pad[2 * (len(view.input_shape) - 1) :]
        if any(batch):
            raise UnsupportedError(
                f"{view.path} pads the batch axis by {tuple(batch)}: pad the other axes only."
            )

    def apply(self, view: View, x: Tensor) -> Tensor:
        """Pad, a constant border with zeros."""
        module = cast(Pad, view.module)
        return F.pad(x, module.pad, mode=module.mode)
