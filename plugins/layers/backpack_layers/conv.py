"""Rules of convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from torch.nn.modules.conv import _ConvNd

from backpack_core.calls import ModuleCall
from backpack_core.contractions import DirectRows
from backpack_core.rules import AffineRule
from backpack_layers.arguments import once
from backpack_layers.layout import require_channels
from backpack_layers.linear_map import over_columns, transposed


class _ConvolutionRule(AffineRule):
    """What both kinds share; the positions that share the weight are the output's pixels."""

    jacobian_is_constant = True

    def check(self, call: ModuleCall) -> None:
        """Refuse an input without a batch axis."""
        require_channels(call)

    def groups(self, call: ModuleCall) -> int:
        """The module's ``groups``."""
        return _conv(call).groups

    def affine_input(self, call: ModuleCall) -> Tensor:
        """The unfolded input, stored as ``[N, G, I, S]``: products over ``S`` then copy nothing."""
        x = call.input
        patches = once(call, "patches", lambda: self._patches(call, x))
        return patches.permute(0, 3, 1, 2)

    def affine_rows(self, call: ModuleCall) -> Patches:
        """The unfolded input, for some samples at a time."""
        return Patches(call, self._patches)

    def affine_output(self, call: ModuleCall, mat: Tensor) -> Tensor:
        """The columns, a view."""
        return _by_position(mat, _conv(call).groups)

    @abstractmethod
    def _patches(self, call: ModuleCall, x: Tensor) -> Tensor:
        """What the kernel sees of ``x`` at each position, ``[N, G, I, S]``."""


class ConvRule(_ConvolutionRule):
    """``Conv1d`` to ``Conv3d``."""

    module_types = (Conv1d, Conv2d, Conv3d)

    def affine_rows(self, call: ModuleCall) -> Patches:
        """The unfolded input, for some samples at a time, or a grouped kernel in its place."""
        return DirectPatches(call, self._patches)

    def _patches(self, call: ModuleCall, x: Tensor) -> Tensor:
        conv = _conv(call)
        x = _pad(conv, x)
        return _windows(x, conv.kernel_size, conv.stride, conv.dilation, conv.groups)

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        conv = _conv(call)
        weight, size = call.parameter("weight"), call.input_shape[2:]
        if conv.padding_mode == "zeros":
            low = [left for left, _ in _padding(conv)]
            # What torch pads on the right only is a longer input whose end is cut off.
            longer = [
                n + right - left for n, (left, right) in zip(size, _padding(conv), strict=True)
            ]
            product = over_columns(lambda m: _transpose(conv, m, weight, low, longer), mat)
            return _cut(product, size)
        padded = [n + left + right for n, (left, right) in zip(size, _padding(conv), strict=True)]
        product = over_columns(lambda m: _transpose(conv, m, weight, [0] * len(size), padded), mat)
        return transposed(lambda x: _pad(conv, x), call.input_shape[1:], product)

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        weight = call.parameter("weight")
        return over_columns(lambda m: _convolve(_conv(call), m, weight), mat)

    def _param_jac_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        if name == "bias":
            return _spread_bias(call, mat)
        # Columns become output channels: one convolution for all of them.
        groups = _conv(call).groups
        weight = mat.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 2)
        product = _convolve(_conv(call), call.input, weight)
        return _columns_from_channels(call, product, len(mat))


class ConvTransposeRule(_ConvolutionRule):
    """``ConvTranspose1d`` to ``ConvTranspose3d``, as a convolution of the input with gaps.

    What each pixel of the output sees is the input spread out by the stride, with zeros between.
    """

    module_types = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)

    def weight_to_matrix(self, call: ModuleCall, mat: Tensor) -> Tensor:
        """The weight is stored as ``[G·C, O, *K]``, where ``I = C·K``."""
        lead = mat.shape[: mat.dim() - call.parameter("weight").dim()]
        out_channels = mat.shape[len(lead) + 1]
        grouped = mat.reshape(
            *lead, _conv(call).groups, -1, out_channels, *mat.shape[len(lead) + 2 :]
        )
        return grouped.transpose(len(lead) + 1, len(lead) + 2).flatten(len(lead) + 2)

    def from_matrix(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        """The weight is stored as ``[G·C, O, *K]``, where ``I = C·K``."""
        if name == "bias":
            return super().from_matrix(call, name, mat)
        kernel = _conv(call).kernel_size
        split = mat.reshape(*mat.shape[:-1], -1, torch.Size(kernel).numel())
        return split.transpose(-3, -2).reshape(*mat.shape[:-3], *call.parameter("weight").shape)

    def _patches(self, call: ModuleCall, x: Tensor) -> Tensor:
        conv = _conv(call)
        spread = x
        pads: list[int] = []
        axes = zip(
            call.output_shape[2:], conv.kernel_size, conv.stride, conv.dilation,
            cast("tuple[int, ...]", conv.padding), strict=True,
        )  # fmt: skip
        for axis, (size, kernel, stride, dilation, padding) in enumerate(axes, start=2):
            spread = _insert_zeros(spread, axis, stride)
            reach = dilation * (kernel - 1)
            left = reach - padding
            pads = [left, size + reach - left - spread.shape[axis], *pads]
        spread = F.pad(spread, pads)
        ones = [1] * len(conv.stride)
        return _windows(spread, conv.kernel_size, ones, conv.dilation, conv.groups, flip=True)

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        conv, weight = _conv(call), call.parameter("weight")
        padding = cast("tuple[int, ...]", conv.padding)

        def convolve(m: Tensor) -> Tensor:
            return torch.convolution(
                m, weight, None, conv.stride, padding, conv.dilation, False, [0] * len(padding),
                conv.groups,
            )  # fmt: skip

        # An output padding of a stride or more (legal with dilation) makes room for more pixels.
        return _cut(over_columns(convolve, mat), call.input_shape[2:])

    def _jac_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        return self._forward(call, mat, call.parameter("weight"))

    def _param_jac_mat_prod(self, call: ModuleCall, name: str, mat: Tensor) -> Tensor:
        if name == "bias":
            return _spread_bias(call, mat)
        weight = mat.movedim(0, 1).flatten(1, 2)
        product = self._forward(call, call.input.unsqueeze(0), weight).squeeze(0)
        return _columns_from_channels(call, product, len(mat))

    def _forward(self, call: ModuleCall, mat: Tensor, weight: Tensor) -> Tensor:
        conv = _conv(call)
        padding, size = cast("tuple[int, ...]", conv.padding), call.output_shape[2:]
        return over_columns(lambda m: _transpose(conv, m, weight, padding, size), mat)


class Patches:
    """The unfolded input ``[N, S, G, I]``, made when samples are asked for: it is never whole."""

    def __init__(self, call: ModuleCall, unfold: Callable[[ModuleCall, Tensor], Tensor]) -> None:
        self._call, self._unfold, self._input = call, unfold, call.input
        conv = _conv(call)
        size = conv.in_channels // conv.groups * torch.Size(conv.kernel_size).numel()
        positions = call.output_shape[2:].numel()
        self.shape = torch.Size((len(self._input), positions, conv.groups, size))

    def __getitem__(self, rows: slice) -> Tensor:
        """What the samples ``rows`` show to the kernel, ``[n, S, G, I]``."""
        return self._unfold(self._call, self._input[rows]).permute(0, 3, 1, 2)


class DirectPatches(Patches, DirectRows):
    """Products with the patches by oneDNN's gradient of a grouped weight, a group for each sample.

    It needs no patches, and is faster for maps that are large compared with the weight. The limits
    are measured: ``docs/design/contractions.md``.
    """

    # Entries of a product for each position up to which the kernel wins; features from which on it
    # wins for images of one or three channels.
    LARGEST, MANY = 300, 192

    def suits(self, columns: int, out: Tensor) -> bool:
        """Whether oneDNN has a fast kernel, and products are small."""
        _, positions, groups, size = self.shape
        channels, features = _conv(self._call).in_channels // groups, columns * out.shape[4]
        return (
            out.device.type == "cpu"
            and out.dtype == self._input.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and bool(torch.backends.mkldnn.enabled)
            and size > channels
            and features * size <= self.LARGEST * positions
            and (
                channels % 8 == features % 8 == 0
                or (channels in (1, 3) and features % 8 == 0 and features >= self.MANY)
                or channels == features == 1
            )
        )

    def product(self, out: Tensor, rows: slice) -> Tensor:
        """``Σ_s out ⊗ inp`` for columns ``[v, n, S, G, O]``, as ``[n·G, v·O, I]``."""
        conv, x = _conv(self._call), self._input[rows]
        x, padding = _zero_padded(conv, x)
        mat = out.permute(1, 3, 0, 4, 2).reshape(1, -1, *self._call.output_shape[2:])
        groups = len(x) * conv.groups
        weight = x.new_empty(1).expand(mat.shape[1], x.shape[1] // conv.groups, *conv.kernel_size)
        product: Tensor = torch.ops.aten.convolution_backward(
            mat, x.reshape(1, -1, *x.shape[2:]), weight, None, conv.stride, padding, conv.dilation,
            False, [0] * len(padding), groups, [False, True, False],
        )[1]  # fmt: skip
        return product.view(groups, -1, self.shape[3])


def _conv(call: ModuleCall) -> _ConvNd:
    return cast(_ConvNd, call.module)


def _padding(conv: _ConvNd) -> list[tuple[int, int]]:
    """Padding before and after each spatial axis; ``"same"`` puts an odd one at the end."""
    if conv.padding == "valid":
        return [(0, 0)] * len(conv.kernel_size)
    if conv.padding == "same":
        reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [(r // 2, r - r // 2) for r in reach]
    return [(p, p) for p in cast("tuple[int, ...]", conv.padding)]


def _pad(conv: _ConvNd, x: Tensor) -> Tensor:
    pads = [p for pair in reversed(_padding(conv)) for p in pair]
    if not any(pads):
        return x
    return F.pad(x, pads, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)


def _zero_padded(conv: _ConvNd, x: Tensor) -> tuple[Tensor, list[int]]:
    """The input and the padding that is left to the kernel, which knows zeros on both sides."""
    padding = _padding(conv)
    if conv.padding_mode == "zeros" and all(left == right for left, right in padding):
        return x, [left for left, _ in padding]
    return _pad(conv, x), [0] * len(padding)


def _convolve(conv: _ConvNd, x: Tensor, weight: Tensor) -> Tensor:
    x, padding = _zero_padded(conv, x)
    return torch.convolution(
        x, weight, None, conv.stride, padding, conv.dilation, False, [0] * len(padding), conv.groups
    )


def _transpose(
    conv: _ConvNd, mat: Tensor, weight: Tensor, padding: Sequence[int], size: Sequence[int]
) -> Tensor:
    """Transposed convolution whose result has the spatial size ``size``."""
    output_padding = [
        n - ((m - 1) * s - 2 * p + d * (k - 1) + 1)
        for n, m, k, s, p, d in zip(
            size, mat.shape[2:], conv.kernel_size, conv.stride, padding, conv.dilation, strict=True
        )
    ]
    return torch.convolution(
        mat, weight, None, conv.stride, padding, conv.dilation, True, output_padding, conv.groups
    )


def _cut(mat: Tensor, size: Sequence[int]) -> Tensor:
    """Keep the first pixels of ``[V, N, C, *spatial]``."""
    for axis, length in enumerate(size, start=3):
        mat = mat.narrow(axis, 0, length)
    return mat


def _insert_zeros(x: Tensor, axis: int, stride: int) -> Tensor:
    """Put ``stride - 1`` zeros between (and after) the entries along an axis."""
    if stride == 1:
        return x
    x = x.unsqueeze(axis + 1)
    pads = [0, 0] * (x.dim() - axis - 2) + [0, stride - 1]
    return F.pad(x, pads).flatten(axis, axis + 1)


def _windows(
    x: Tensor,  # [N, G·C, *L]
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    flip: bool = False,
) -> Tensor:
    """What the kernel sees at each position, ``[N, G, C·K, S]``; copies once, or not at all."""
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    dims = len(kernel)
    x = x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    if flip:
        x = x.flip(list(range(2, 2 + dims)))
    positions = x.shape[2 + dims :].numel()
    return x.reshape(x.shape[0], groups, -1, positions)


def _by_position(mat: Tensor, groups: int) -> Tensor:
    """``[V, N, G·O, *spatial] → [V, N, S, G, O]``."""
    grouped = mat.reshape(*mat.shape[:2], groups, -1, mat.shape[3:].numel())
    return grouped.permute(0, 1, 4, 2, 3)


def _columns_from_channels(call: ModuleCall, product: Tensor, columns: int) -> Tensor:
    """``[N, G·V·O, *spatial] → [V, N, G·O, *spatial]``."""
    batch, channels, *spatial = call.output_shape
    grouped = product.reshape(batch, _conv(call).groups, columns, -1, *spatial)
    return grouped.movedim(2, 0).reshape(columns, batch, channels, *spatial)


def _spread_bias(call: ModuleCall, mat: Tensor) -> Tensor:
    """``[V, C] → [V, N, C, *spatial]``."""
    shape = call.output_shape
    columns = mat.reshape(len(mat), 1, -1, *[1] * (len(shape) - 2))
    return columns.expand(-1, *shape)
