"""Rules of convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
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

from backpack_core.record.view import View
from backpack_layers.layout import require_channels
from backpack_layers.linear_map import over_columns, transposed
from backpack_operations.operands import Operand, products_at
from backpack_products.affine import AffineProduct
from backpack_products.multiply import multiply_each
from backpack_products.parametric import AffineRule
from backpack_products.rows import DirectRows
from backpack_products.tuning import READ, WRITE


class _ConvolutionRule(AffineRule):
    """Base of both kinds; the positions that share the weight are the output's pixels."""

    jacobian_is_constant = True

    def check(self, view: View) -> None:
        """Refuse an input without a batch axis."""
        require_channels(view)

    def groups(self, view: View) -> int:
        """The module's ``groups``."""
        return _conv(view).groups

    def affine_input(self, view: View) -> Patches:
        """The unfolded input, for some samples at a time."""
        return Patches(_conv(view), self._unfold, view.input, view.output_shape[2:])

    def affine_output(self, view: View, mat: Tensor) -> Tensor:
        """The columns, a view."""
        return _by_position(mat, _conv(view).groups)

    @staticmethod
    @abstractmethod
    def _unfold(conv: _ConvNd, size: torch.Size, x: Tensor) -> Tensor:
        """What the kernel sees of ``x`` at each pixel of the output, ``[N, G, I, S]``.

        With ``S`` last, products over ``S`` need no copy.
        """


class ConvRule(_ConvolutionRule):
    """``Conv1d`` to ``Conv3d``."""

    module_types = (Conv1d, Conv2d, Conv3d)

    def affine_input(self, view: View) -> Patches:
        """The unfolded input, for some samples at a time, or a grouped kernel instead."""
        return DirectPatches(_conv(view), self._unfold, view.input, view.output_shape[2:])

    @staticmethod
    def _unfold(conv: _ConvNd, size: torch.Size, x: Tensor) -> Tensor:
        x = _pad(conv, x)
        return _windows(x, conv.kernel_size, conv.stride, conv.dilation, conv.groups)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        conv = _conv(view)
        weight, size = view.parameter("weight"), view.input_shape[2:]
        if conv.padding_mode == "zeros":
            low = [left for left, _ in _padding(conv)]
            # Extra padding on the right counts as a longer input, whose end is cut off.
            longer = [
                n + right - left for n, (left, right) in zip(size, _padding(conv), strict=True)
            ]
            product = over_columns(lambda m: _transpose(conv, m, weight, low, longer), mat)
            return _cut(product, size)
        padded = [n + left + right for n, (left, right) in zip(size, _padding(conv), strict=True)]
        product = over_columns(lambda m: _transpose(conv, m, weight, [0] * len(size), padded), mat)
        return transposed(lambda x: _pad(conv, x), view.input_shape[1:], product)


class ConvTransposeRule(_ConvolutionRule):
    """``ConvTranspose1d`` to ``ConvTranspose3d``, as a convolution of the input with gaps.

    The input is stretched by the stride, with zeros between its entries, and then convolved.
    """

    module_types = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)

    def arrangement(self, view: View, name: str) -> Callable[[Tensor], Tensor] | None:
        """The weight is stored as ``[G·C, O, *K]``, where ``I = C·K``."""
        if name == "bias":
            return None
        pixels, shape = torch.Size(_conv(view).kernel_size).numel(), view.parameter(name).shape

        def arrange(mat: Tensor) -> Tensor:
            rows = rearrange(mat, "... g o (c k) -> ... (g c) o k", k=pixels)
            return rows.reshape(*mat.shape[:-3], *shape)

        return arrange

    @staticmethod
    def _unfold(conv: _ConvNd, size: torch.Size, x: Tensor) -> Tensor:
        pulled = x
        pads: list[int] = []
        axes = zip(
            size, conv.kernel_size, conv.stride, conv.dilation,
            cast("tuple[int, ...]", conv.padding), strict=True,
        )  # fmt: skip
        for axis, (length, kernel, stride, dilation, padding) in enumerate(axes, start=2):
            pulled = _insert_zeros(pulled, axis, stride)
            reach = dilation * (kernel - 1)
            left = reach - padding
            pads = [left, length + reach - left - pulled.shape[axis], *pads]
        pulled = F.pad(pulled, pads)
        ones = [1] * len(conv.stride)
        return _windows(pulled, conv.kernel_size, ones, conv.dilation, conv.groups, flip=True)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        conv, weight = _conv(view), view.parameter("weight")
        padding = cast("tuple[int, ...]", conv.padding)

        def convolve(m: Tensor) -> Tensor:
            return torch.convolution(
                m, weight, None, conv.stride, padding, conv.dilation, False, [0] * len(padding),
                conv.groups,
            )  # fmt: skip

        # An output padding of a stride or more (legal with dilation) makes room for more pixels.
        return _cut(over_columns(convolve, mat), view.input_shape[2:])


class Patches:
    """The unfolded input ``[N, S, G, I]``, formed for a few samples at a time."""

    def __init__(
        self,
        conv: _ConvNd,
        unfold: Callable[[_ConvNd, torch.Size, Tensor], Tensor],
        x: Tensor,
        size: torch.Size,
    ) -> None:
        self._conv, self._unfold, self._input, self._size = conv, unfold, x, size
        features = conv.in_channels // conv.groups * torch.Size(conv.kernel_size).numel()
        self.shape = torch.Size((len(x), size.numel(), conv.groups, features))

    def __getitem__(self, samples: slice) -> Tensor:
        """What some samples show to the kernel, ``[n, S, G, I]``."""
        return self._unfold(self._conv, self._size, self._input[samples]).permute(0, 3, 1, 2)


class DirectPatches(Patches, DirectRows):
    """Products with the patches by oneDNN's weight gradient of a convolution, a group per sample.

    It forms no patches, and is faster if feature maps are large compared with the weight. The
    limits are measured by ``python -m benchmarks.kernels``; see ``docs/design/products.md``.
    """

    # The kernel is faster up to this many entries of a product per position; for images of one or
    # three channels, from this many features on, if these are more than twice what they multiply.
    LARGEST, MANY = 300, 64

    def suits(self, columns: int, out: Tensor) -> bool:
        """Whether oneDNN has a fast kernel, and products are small."""
        _, positions, groups, size = self.shape
        channels, features = self._conv.in_channels // groups, columns * out.shape[4]
        are_many = features >= max(self.MANY, 2.5 * size)
        return (
            out.device.type == "cpu"
            and out.dtype == self._input.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and bool(torch.backends.mkldnn.enabled)
            and size > channels
            and features * size <= self.LARGEST * positions
            and (
                channels % 8 == features % 8 == 0
                or (channels in (1, 3) and features % 8 == 0 and are_many)
                or channels == features == 1
            )
        )

    def product(self, out: Tensor, samples: slice) -> Tensor:
        """``Σ_s out ⊗ inp`` for columns ``[v, n, S, G, O]``, as ``[n·G, v·O, I]``."""
        groups = out[0, :, 0, :, 0].numel()
        return self._weight_gradient(out, samples, (1, -1), groups).reshape(
            groups, -1, self.shape[3]
        )

    def position_sum(self) -> Tensor:
        """Sum over positions one axis at a time: each entry of the kernel sees a range of it."""
        conv, x = self._conv, _pad(self._conv, self._input)
        axes = zip(self._size, conv.kernel_size, conv.stride, conv.dilation, strict=True)
        for axis, (length, kernel, stride, dilation) in enumerate(axes, start=2):
            seen = x.unfold(axis, stride * (length - 1) + 1, dilation).narrow(axis, 0, kernel)
            x = seen[..., ::stride].sum(-1)
        return x.reshape(len(x), conv.groups, self.shape[3])

    def total(self, out: Tensor) -> Tensor | None:
        """By the kernel of the plain gradient, with all columns as features of one output."""
        if out.device.type != "cpu" or out.dtype != self._input.dtype:
            return None  # measured in these cases only
        columns, samples, _, groups, features = out.shape
        gradient = self._weight_gradient(out, slice(0, samples), (samples, -1), groups)
        return gradient.reshape(groups, columns, features, self.shape[3]).transpose(0, 1)

    def gram_size(self) -> int:
        """The size of a Gram matrix over pixels, if that takes less time than one over patches."""
        conv, (_, positions, groups, size) = self._conv, self.shape
        padding, lengths = _padding(conv), self._input.shape[2:]
        pixels = torch.Size(n + sum(p) for n, p in zip(lengths, padding, strict=True)).numel()
        channels, shifts = conv.in_channels // groups, size * groups // conv.in_channels
        by_pixels = pixels**2 * (channels + WRITE) + shifts * positions**2 * (2 * READ + WRITE)
        by_patches = positions * size * (0.6 * positions + READ + WRITE)
        return groups * (pixels**2 + positions**2) if by_pixels < by_patches else 0

    def gram(self, samples: slice) -> Tensor:
        """``Σ_k ⟨x[s + k], x[t + k]⟩`` over the entries ``k`` of the kernel, for pixels ``x``."""
        conv, x = self._conv, _pad(self._conv, self._input[samples])
        pixels = x.reshape(len(x) * conv.groups, -1, x.shape[2:].numel())
        met = multiply_each(pixels.mT, pixels).view(-1, *x.shape[2:], *x.shape[2:])
        total: Tensor | None = None
        for entry in product(*map(range, conv.kernel_size)):
            axes = zip(entry, self._size, conv.stride, conv.dilation, strict=True)
            seen = [slice(k * d, k * d + s * (n - 1) + 1, s) for k, n, s, d in axes]
            part = met[(slice(None), *seen, *seen)]
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        return total.reshape(-1, self.shape[1], self.shape[1])

    def _weight_gradient(
        self, out: Tensor, samples: slice, lead: tuple[int, int], groups: int
    ) -> Tensor:
        """The gradient of a weight with some groups, of samples and features laid out as given."""
        conv, x = self._conv, self._input[samples]
        x, padding = _zero_padded(conv, x)
        mat = out.permute(1, 3, 0, 4, 2).reshape(*lead, *self._size)
        # Nobody reads it, but torch makes a copy of one that has strides of zero.
        weight = x.new_empty(mat.shape[1], x.shape[1] // conv.groups, *conv.kernel_size)
        gradient: Tensor = torch.ops.aten.convolution_backward(
            mat, x.reshape(*lead, *x.shape[2:]), weight, None, conv.stride, padding, conv.dilation,
            False, [0] * len(padding), groups, [False, True, False],
        )[1]  # fmt: skip
        return gradient


def _conv(view: View) -> _ConvNd:
    return cast(_ConvNd, view.module)


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
    """The padded input, and the padding left to the kernel, which can only add zeros evenly."""
    padding = _padding(conv)
    if conv.padding_mode == "zeros" and all(left == right for left, right in padding):
        return x, [left for left, _ in padding]
    return _pad(conv, x), [0] * len(padding)


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
    positions, size = x.shape[2 + dims :].numel(), x.shape[1 : 2 + dims].numel() // groups
    return x.reshape(x.shape[0], groups, size, positions)


def _by_position(mat: Tensor, groups: int) -> Tensor:
    """``[V, N, G·O, *spatial] → [V, N, S, G, O]``."""
    features = mat.shape[2] // groups
    grouped = mat.reshape(*mat.shape[:2], groups, features, mat.shape[3:].numel())
    return grouped.permute(0, 1, 4, 2, 3)


@products_at("Convolution")
def _of_function(operand: Operand, mat: Tensor) -> AffineProduct | None:
    """The product of a weight or bias passed to ``F.conv2d``, as at a module."""
    node, position, shape, _ = operand
    if node._saved_transposed or position == 0:
        return None
    out, x, weight = _by_position(mat, node._saved_groups), node._saved_input, node._saved_weight
    if position == 2:
        return AffineProduct(out, None, shape)
    kind: Any = (Conv1d, Conv2d, Conv3d)[x.dim() - 3]
    settings = node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_groups
    conv = kind(x.shape[1], len(weight), shape[2:], *settings, bias=False, device="meta")
    return AffineProduct(out, DirectPatches(conv, ConvRule._unfold, x, mat.shape[3:]), shape)
