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


class SumModuleRule(LayerRule):
    """``y = Σ_i x_i``: every input receives the columns as they are."""

    module_types = (SumModule,)
    hessian_is_zero = True

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> tuple[Tensor, ...]:
        return (mat,) * len(call.inputs)


class ScaleModuleRule(ParametricRule):
    """``y = w x`` with one number ``w``."""

    module_types = (ScaleModule,)
    params = ("weight",)
    linear_in_params = ("weight",)
    hessian_is_zero = True

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return mat * call.parameter("weight")

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return mat * call.parameter("weight")

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

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> tuple[Tensor | None, ...]:
        elements = call.args[0] if call.args else call.kwargs["input"]
        index = cast(ReduceTuple, call.module).index
        before = elements[: range(len(elements))[index]]
        chosen = sum(1 for _ in iter_tensors(tuple(before))) + call.output_nr
        return tuple(mat if slot == chosen else None for slot in range(len(call.inputs)))


def scatter_features(positions: Tensor, mat: Tensor, shape: torch.Size) -> Tensor:
    """Transpose of a map whose outputs are copies of inputs.

    Args:
        positions: Flat position in a sample of the input, for each feature of a sample of the
            output. Shape ``[*out]``.
        mat: Columns at the output. Shape ``[V, N, *out]``.
        shape: Shape of a sample of the input.

    Returns:
        Columns at the input: the sum over the copies of each feature. Shape ``[V, N, *in]``.
    """
    columns = mat.reshape(*mat.shape[:2], -1)
    zeros = columns.new_zeros(*mat.shape[:2], shape.numel())
    return zeros.index_add(2, positions.flatten(), columns).reshape(*mat.shape[:2], *shape)


class SlicingRule(LayerRule):
    """``y = x[index]``, where the index leaves the batch axis alone."""

    module_types = (Slicing,)
    hessian_is_zero = True

    def check(self, call: ModuleCall) -> None:
        """Refuse indices that select or move samples."""
        if not _keeps_batch(_index(call), call.input_shape):
            raise UnsupportedError(
                f"{call.path} indexes with {call.module.slice_info!r}, which touches the batch "
                "axis, so its outputs are no longer the samples of its input: begin the index "
                "with a full slice, as in (slice(None), ...)."
            )

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        shape = call.input_shape[1:]
        features = torch.arange(shape.numel(), device=mat.device).reshape(shape)
        index = _index(call)
        # An ellipsis stands for the batch axis and maybe more; a first full slice for it alone.
        rest = index if index and index[0] is Ellipsis else index[1:]
        return scatter_features(features[rest], mat, shape)

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        result: Tensor = mat[(slice(None), *_index(call))]
        return result


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


class PadRule(LayerRule):
    """``y`` is ``x`` with a border; constant borders receive nothing back, copies are summed."""

    module_types = (Pad,)
    hessian_is_zero = True

    def check(self, call: ModuleCall) -> None:
        """Refuse padding of the batch axis."""
        batch = cast(Pad, call.module).pad[2 * (len(call.input_shape) - 1) :]
        if any(batch):
            raise UnsupportedError(
                f"{call.path} pads the batch axis by {tuple(batch)}: pad the other axes only."
            )

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        module = cast(Pad, call.module)
        if module.mode == "constant":
            return F.pad(mat, tuple(-size for size in module.pad))
        shape = call.input_shape[1:]
        # Copies of numbers: a double holds every position exactly.
        features = torch.arange(shape.numel(), dtype=torch.float64, device=mat.device)
        positions = module(features.reshape(1, *shape)).long()
        return scatter_features(positions, mat, shape)

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        module = cast(Pad, call.module)
        if module.mode == "constant":
            return F.pad(mat, module.pad)
        result: Tensor = module(mat.flatten(0, 1)).unflatten(0, mat.shape[:2])
        return result
