"""Rules for the helper modules of ``backpack_core.modules``.

``Parallel`` is a container and needs none.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from backpack_core.calls import ModuleCall, iter_tensors
from backpack_core.errors import UnsupportedError
from backpack_core.modules import Pad, Permute, ReduceTuple, ScaleModule, Slicing, SumModule
from backpack_core.rules import LayerRule, ParametricRule
from backpack_layers.linear_map import LinearMapRule


class SumModuleRule(LayerRule):
    """``y = Σ_i x_i``: every input receives the columns as they are."""

    module_types = (SumModule,)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> tuple[Tensor, ...]:
        return (mat,) * len(call.inputs)


class ScaleModuleRule(ParametricRule):
    """``y = w x`` with one number ``w``."""

    module_types = (ScaleModule,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True
    jacobian_is_constant = True

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        weight = cast(ScaleModule, call.module).weight
        return mat * (call.parameter("weight") if isinstance(weight, Tensor) else weight)

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return self._jac_t_mat_prod(call, mat)

    def _param_jac_t_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        inputs = call.input.reshape(call.batch_size, -1)
        columns = mat.reshape(*mat.shape[:2], -1)
        return torch.einsum("vnd,nd->vn", columns, inputs).unsqueeze(-1)

    def _param_jac_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        return mat.reshape(-1, *[1] * call.input.dim()) * call.input


class PermuteRule(LayerRule):
    """``y = x`` with its axes rearranged, the batch axis first."""

    module_types = (Permute,)
    hessian_is_zero = True
    jacobian_is_constant = True

    def check(self, call: ModuleCall) -> None:
        """Refuse permutations that move the batch axis."""
        order = _permutation(call)
        if order[0] != 0:
            raise UnsupportedError(
                f"{call.path} moves the batch axis (order of axes: {order}), and quantities of "
                "single samples need it first: leave axis 0 in its place."
            )

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        order = _permutation(call)
        return mat.permute(0, *(order.index(axis) + 1 for axis in range(len(order))))

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return mat.permute(0, *(axis + 1 for axis in _permutation(call)))


def _permutation(call: ModuleCall) -> tuple[int, ...]:
    return cast(Permute, call.module).permutation(len(call.input_shape))


class ReduceTupleRule(LayerRule):
    """``y = x_k``: the columns go to the chosen element."""

    module_types = (ReduceTuple,)
    hessian_is_zero = True
    # It returns one of its inputs: the graph leads to that one only, not to the rest of the tuple.
    transparent = True

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> tuple[Tensor | None, ...]:
        elements = call.args[0] if call.args else call.kwargs["input"]
        index = cast(ReduceTuple, call.module).index
        before = elements[: range(len(elements))[index]]
        chosen = sum(1 for _ in iter_tensors(tuple(before))) + call.output_nr
        return tuple(mat if slot == chosen else None for slot in range(len(call.inputs)))


class SlicingRule(LinearMapRule):
    """``y = x[index]``, where the index leaves the batch axis alone."""

    module_types = (Slicing,)

    def check(self, call: ModuleCall) -> None:
        """Refuse indices that select or move samples."""
        if not _keeps_batch(_index(call), call.input_shape):
            raise UnsupportedError(
                f"{call.path} indexes with {call.module.slice_info!r}, which touches the batch "
                "axis, so its outputs are no longer the samples of its input: begin the index "
                "with a full slice, as in (slice(None), ...)."
            )

    def apply(self, call: ModuleCall, x: Tensor) -> Tensor:
        """Index all samples, however many there are."""
        index = _index(call)
        if index and index[0] is not Ellipsis:
            index = (slice(None), *index[1:])
        return x[index]

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        index = _index(call)
        if any(map(_is_array, index)):  # an index array may name an entry twice
            return super()._jac_t_mat_prod(call, mat)
        product = mat.new_zeros(len(mat), *call.input_shape)
        product[(slice(None), *index)] = mat
        return product


def _index(call: ModuleCall) -> tuple[Any, ...]:
    info = cast(Slicing, call.module).slice_info
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

    It needs a full slice (or an ellipsis that covers axis 0) in front, and no two index arrays
    with something between them, for which the axis they make moves to the front.
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

    def check(self, call: ModuleCall) -> None:
        """Refuse padding of the batch axis."""
        batch = cast(Pad, call.module).pad[2 * (len(call.input_shape) - 1) :]
        if any(batch):
            raise UnsupportedError(
                f"{call.path} pads the batch axis by {tuple(batch)}: pad the other axes only."
            )

    def apply(self, call: ModuleCall, x: Tensor) -> Tensor:
        """Pad, a constant border with zeros."""
        module = cast(Pad, call.module)
        return F.pad(x, module.pad, mode=module.mode)
