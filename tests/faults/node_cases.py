"""A small function for every autograd node of the bridge's tables, by the node's type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[[Tensor], Tensor]
aten = torch.ops.aten


def _square(x: Tensor) -> Tensor:
    """``[2, 4, 6] → [2, 4, 4]``, as a matrix or an image of one channel."""
    return x[:, :, :4]


def _image(x: Tensor) -> Tensor:
    return x.reshape(1, 2, 4, 6)


def _volume(x: Tensor) -> Tensor:
    return x.reshape(1, 2, 2, 2, 6)


def _index(x: Tensor) -> Tensor:
    return torch.tensor([3, 0, 0, 2])


def _sent_back(function: Function) -> Function:
    """What a function sends back to x of something that is linear in x."""

    def send(x: Tensor) -> Tensor:
        # In inference, x is a leaf that wants no gradient.
        point = x if x.requires_grad else x.detach().requires_grad_()
        with torch.enable_grad():
            made = function(point)
            given = x.repeat(made.numel() // x.numel() + 1, 1, 1).flatten()[: made.numel()]
            return torch.autograd.grad(made, point, given.view_as(made), create_graph=True)[0]

    return send


# In all entries of x, of shape [2, 4, 6].
LINEAR: dict[str, Function] = {
    "AdaptiveAvgPool2DBackward0": lambda x: F.adaptive_avg_pool2d(_image(x), (2, 3)),
    "AdaptiveAvgPool3DBackward0": lambda x: F.adaptive_avg_pool3d(_volume(x), (1, 2, 3)),
    "AddBackward0": lambda x: torch.add(x[0], x[1], alpha=3),
    "AddBackward1": lambda x: aten.add.Scalar(x, 2.0),
    "AliasBackward0": lambda x: aten.alias(x),
    "AliasBackward0_copy": lambda x: aten.alias_copy(x),
    "AsStridedBackward0": lambda x: x.as_strided((2, 3), (1, 2)),
    "AsStridedBackward0_copy": lambda x: aten.as_strided_copy(x, (2, 3), (1, 2)),
    "AsStridedBackward1": lambda x: (x * 1).as_strided_((2, 3), (1, 2)),
    "AvgPool2DBackward0": lambda x: F.avg_pool2d(_image(x), 2, padding=1),
    "AvgPool3DBackward0": lambda x: F.avg_pool3d(_volume(x), 2),
    "CatBackward0": lambda x: torch.cat([x[0], x[1]]),
    "CloneBackward0": lambda x: x.clone(),
    "Col2ImBackward0": lambda x: F.fold(x.reshape(1, 4, 12), (5, 4), 2),
    "ConstantPadNdBackward0": lambda x: F.pad(x, (1, -1), value=2.0),
    "CumsumBackward0": lambda x: x.cumsum(1),
    "DiagonalBackward0": lambda x: _square(x).diagonal(1, 1, 2),
    "DiagonalBackward0_copy": lambda x: torch.diagonal_copy(_square(x), 1, 1, 2),
    "EmbeddingBackward0": lambda x: F.embedding(_index(x), x[0]),
    "ExpandBackward0": lambda x: x[:, None].expand(2, 3, 4, 6),
    "ExpandBackward0_copy": lambda x: aten.expand_copy(x[:, None], (2, 3, 4, 6)),
    "FlipBackward0": lambda x: x.flip(1),
    "GatherBackward0": lambda x: x.gather(1, torch.tensor([[[3, 0]], [[1, 1]]])),
    "Im2ColBackward0": lambda x: F.unfold(_image(x), 2),
    "IndexAddBackward0": lambda x: x.index_add(1, _index(x), x.flip(1)),
    "IndexBackward0": lambda x: x[:, [3, 0, 0]],
    "IndexPutBackward0": lambda x: x.index_put((torch.tensor([1]),), x[:1] * 2),
    "IndexPutImplBackward0": lambda x: aten._index_put_impl(x, (torch.tensor([1]),), x[:1] * 2),
    "IndexSelectBackward0": lambda x: x.index_select(1, _index(x)),
    "LiftFreshBackward0": lambda x: aten.lift_fresh(x),
    "LiftFreshBackward0_copy": lambda x: aten.lift_fresh_copy(x),
    "MaskedFillBackward0": lambda x: x.masked_fill(torch.ones_like(x).tril() > 0, 2.0),
    "MaskedFillBackward1": lambda x: x.masked_fill(torch.ones_like(x).tril() > 0, x[0, 0, 0]),
    "MeanBackward0": lambda x: x.mean(),
    "MeanBackward1": lambda x: x.mean(1),
    "NegBackward0": lambda x: -x,
    "PermuteBackward0": lambda x: x.permute(2, 0, 1),
    "PermuteBackward0_copy": lambda x: torch.permute_copy(x, (2, 0, 1)),
    "PixelShuffleBackward0": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 6), 2),
    "ReflectionPad1DBackward0": lambda x: F.pad(x, (2, 1), mode="reflect"),
    "ReflectionPad2DBackward0": lambda x: F.pad(_image(x), (2, 1, 1, 0), mode="reflect"),
    "ReflectionPad3DBackward0": lambda x: F.pad(_volume(x), (2, 1, 1, 0, 0, 1), mode="reflect"),
    "RepeatBackward0": lambda x: x.repeat(1, 2, 1),
    "ReplicationPad1DBackward0": lambda x: F.pad(x, (2, 1), mode="replicate"),
    "ReplicationPad2DBackward0": lambda x: F.pad(_image(x), (2, 1, 1, 0), mode="replicate"),
    "ReplicationPad3DBackward0": lambda x: F.pad(_volume(x), (2, 1, 1, 0, 0, 1), mode="replicate"),
    "ReshapeAliasBackward0": lambda x: aten._reshape_alias(x, (8, 6), (6, 1)),
    "ReshapeAliasBackward0_copy": lambda x: aten._reshape_alias_copy(x, (8, 6), (6, 1)),
    "RollBackward0": lambda x: x.roll(2, 1),
    "Rot90Backward0": lambda x: x.rot90(1, (1, 2)),
    "RsubBackward0": lambda x: aten.rsub(x[0], x[1]),
    "RsubBackward1": lambda x: aten.rsub(x, 2.0),
    "ScatterAddBackward0": lambda x: x.scatter_add(1, torch.tensor([[[3, 0]], [[1, 1]]]), x),
    "SelectBackward0": lambda x: x.select(1, 2),
    "SelectBackward0_copy": lambda x: torch.select_copy(x, 1, 2),
    "SliceBackward0": lambda x: x[:, 1:3],
    "SliceBackward0_copy": lambda x: aten.slice_copy(x, 1, 1, 3),
    "SplitBackward0": lambda x: x.split(3, 1)[1],
    "SplitBackward0_copy": lambda x: torch.split_copy(x, 3, 1)[1],
    "SplitWithSizesBackward0": lambda x: x.split([1, 3], 1)[1],
    "SplitWithSizesBackward0_copy": lambda x: torch.split_with_sizes_copy(x, (1, 3), 1)[1],
    "SqueezeBackward0": lambda x: x[:, :1].squeeze(),
    "SqueezeBackward0_copy": lambda x: torch.squeeze_copy(x[:, :1]),
    "SqueezeBackward1": lambda x: x[:, :1].squeeze(1),
    "SqueezeBackward1_copy": lambda x: torch.squeeze_copy(x[:, :1], 1),
    "SqueezeBackward2": lambda x: x[:, :1, :1].squeeze((1, 2)),
    "SqueezeBackward2_copy": lambda x: torch.squeeze_copy(x[:, :1, :1], (1, 2)),
    "SqueezeBackward3": lambda x: (x[:, :1] * 1).squeeze_(),
    "SqueezeBackward4": lambda x: (x[:, :1] * 1).squeeze_(1),
    "SqueezeBackward5": lambda x: (x[:, :1, :1] * 1).squeeze_((1, 2)),
    "StackBackward0": lambda x: torch.stack([x[0], x[1]]),
    "SubBackward0": lambda x: torch.sub(x[0], x[1], alpha=3),
    "SubBackward1": lambda x: aten.sub.Scalar(x, 2.0),
    "SumBackward0": lambda x: x.sum(),
    "SumBackward1": lambda x: x.sum(1),
    "TBackward0": lambda x: x[0].t(),
    "TBackward0_copy": lambda x: torch.t_copy(x[0]),
    "TBackward1": lambda x: (x[0] * 1).t_(),
    "ToCopyBackward0": lambda x: x.to(torch.complex128),
    "TraceBackward0": lambda x: x[0].trace(),
    "TransposeBackward0": lambda x: x.transpose(0, 1),
    "TransposeBackward0_copy": lambda x: torch.transpose_copy(x, 0, 1),
    "TransposeBackward1": lambda x: (x * 1).transpose_(0, 1),
    "TrilBackward0": lambda x: x.tril(),
    "TriuBackward0": lambda x: x.triu(),
    "UnbindBackward0": lambda x: x.unbind(1)[2],
    "UnbindBackward0_copy": lambda x: torch.unbind_copy(x, 1)[2],
    "UnfoldBackward0": lambda x: x.unfold(2, 3, 2),
    "UnfoldBackward0_copy": lambda x: torch.unfold_copy(x, 2, 3, 2),
    "UnsafeSplitBackward0": lambda x: torch.unsafe_split(x, 3, 1)[1],
    "UnsafeViewBackward0": lambda x: aten._unsafe_view(x, (8, 6)),
    "UnsqueezeBackward0": lambda x: x.unsqueeze(1),
    "UnsqueezeBackward0_copy": lambda x: torch.unsqueeze_copy(x, 1),
    "UnsqueezeBackward1": lambda x: (x * 1).unsqueeze_(1),
    "UpsampleBicubic2DBackward0": lambda x: F.interpolate(_image(x), (5, 8), mode="bicubic"),
    "UpsampleBilinear2DBackward0": lambda x: F.interpolate(_image(x), (5, 8), mode="bilinear"),
    "UpsampleLinear1DBackward0": lambda x: F.interpolate(x, 9, mode="linear"),
    "UpsampleNearest1DBackward0": lambda x: F.interpolate(x, 9),
    "UpsampleNearest2DBackward0": lambda x: F.interpolate(_image(x), (5, 8)),
    "UpsampleNearest3DBackward0": lambda x: F.interpolate(_volume(x), (3, 3, 7)),
    "UpsampleTrilinear3DBackward0": lambda x: F.interpolate(
        _volume(x), (3, 3, 7), mode="trilinear"
    ),
    "ViewBackward0": lambda x: x.view(8, 6),
    "ViewBackward0_copy": lambda x: torch.view_copy(x, (8, 6)),
    "WhereBackward0": lambda x: torch.where(torch.ones_like(x[0]).tril() > 0, x[0], x[1]),
}
# The same, as long as no entry crosses a kink.
PIECEWISE: dict[str, Function] = {
    "AbsBackward0": lambda x: x.abs(),
    "AdaptiveMaxPool2DBackward0": lambda x: F.adaptive_max_pool2d(_image(x), (2, 3)),
    "AdaptiveMaxPool3DBackward0": lambda x: F.adaptive_max_pool3d(_volume(x), (1, 2, 3)),
    "AmaxBackward0": lambda x: x.amax(1),
    "AminBackward0": lambda x: x.amin(1),
    "ClampBackward0": lambda x: x[:, :2].clamp(x[:, 2:3], x[:, 3:4]),
    "ClampBackward1": lambda x: x.clamp(-0.5, 0.5),
    "ClampMaxBackward0": lambda x: x.clamp_max(0.5),
    "ClampMaxBackward1": lambda x: x[0].clamp_max(x[1]),
    "ClampMinBackward0": lambda x: x.clamp_min(0.5),
    "ClampMinBackward1": lambda x: x[0].clamp_min(x[1]),
    "HardshrinkBackward0": F.hardshrink,
    "HardsigmoidBackward0": lambda x: F.hardsigmoid(3 * x),
    "HardtanhBackward0": F.hardtanh,
    "KthvalueBackward0": lambda x: x.kthvalue(2, 1).values,
    "LeakyReluBackward0": F.leaky_relu,
    "LeakyReluBackward1": lambda x: F.leaky_relu_(x * 1),
    "MaxBackward0": lambda x: x.max(1).values,
    "MaxBackward1": lambda x: x.max(),
    "MaxPool2DWithIndicesBackward0": lambda x: F.max_pool2d(_image(x), 2),
    "MaxPool3DWithIndicesBackward0": lambda x: F.max_pool3d(_volume(x), 2),
    "MaximumBackward0": lambda x: torch.maximum(x[0], x[1]),
    "MedianBackward0": lambda x: x.median(),
    "MedianBackward1": lambda x: x.median(1).values,
    "MinBackward0": lambda x: x.min(1).values,
    "MinBackward1": lambda x: x.min(),
    "MinimumBackward0": lambda x: torch.minimum(x[0], x[1]),
    "NativeDropoutBackward0": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "ReluBackward0": torch.relu,
    "RreluWithNoiseBackward0": lambda x: F.rrelu(x, training=True),
    "RreluWithNoiseBackward1": lambda x: torch.rrelu_(x * 1, training=True),
    "SoftshrinkBackward0": F.softshrink,
    "SortBackward0": lambda x: aten.sort(x, 1)[0],
    "SortBackward1": lambda x: x.sort(stable=True, dim=1).values,
    "ThresholdBackward0": lambda x: F.threshold(x, 0.1, 0.2),
    "ThresholdBackward1": lambda x: F.threshold_(x * 1, 0.1, 0.2),
    "TopkBackward0": lambda x: x.topk(2, 1).values,
}


SENT_BACK_LINEARLY = """
    AdaptiveAvgPool2D AdaptiveAvgPool3D AvgPool2D AvgPool3D Diagonal ReflectionPad1D ReflectionPad2D
    ReflectionPad3D ReplicationPad1D ReplicationPad2D ReplicationPad3D Select Slice Unfold
    UpsampleBicubic2D UpsampleBilinear2D UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D
    UpsampleNearest3D UpsampleTrilinear3D
""".split()  # noqa: SIM905
LINEAR |= {
    f"{name}BackwardBackward0": _sent_back(LINEAR[f"{name}Backward0"])
    for name in SENT_BACK_LINEARLY
}
LINEAR["EmbeddingDenseBackwardBackward0"] = _sent_back(LINEAR["EmbeddingBackward0"])
PIECEWISE |= {
    f"{name}BackwardBackward0": _sent_back(PIECEWISE[f"{name}Backward0"])
    for name in """
        AdaptiveMaxPool2D AdaptiveMaxPool3D Hardtanh LeakyRelu MaxPool2DWithIndices
        MaxPool3DWithIndices Threshold
    """.split()  # noqa: SIM905
}


def _nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(x))


def _padded(x: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(x, 0.0)


# In each of two factors [2, 4, 4], and not in both.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AddcmulBackward0": lambda x, y: torch.addcmul(torch.ones(4), x, y),
    "AddmmBackward0": lambda x, y: torch.addmm(torch.ones(4), x[0], y[1]),
    "AddmvBackward0": lambda x, y: torch.addmv(torch.ones(4), x[0], y[0, 1]),
    "BaddbmmBackward0": lambda x, y: torch.baddbmm(torch.ones(4), x, y),
    "BmmBackward0": torch.bmm,
    "ConvolutionBackward0": lambda x, y: F.conv1d(x, y, padding=1),
    "ConvolutionBackward1": lambda x, y: aten._convolution(
        x, y, None, [1], [1], [1], False, [0], 1, False, False, False, False
    ),
    "DotBackward0": lambda x, y: torch.dot(x[0, 0], y[0, 0]),
    "LinearBackward0": lambda x, y: _padded(F.linear(_nested(x), y[0])),
    "MatmulBackward0": lambda x, y: _padded(torch.matmul(_nested(x), _nested(y))),
    "MmBackward0": lambda x, y: torch.mm(x[0], y[1]),
    "MulBackward0": torch.mul,
    "MvBackward0": lambda x, y: torch.mv(x[0], y[0, 1]),
}
# In a single factor: the other one is a number.
SCALED: dict[str, Function] = {"MulBackward1": lambda x: aten.mul.Scalar(x, 3.0)}
# In the first argument, and not in the second.
QUOTIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "DivBackward0": torch.div,
    "DivBackward2": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}
SCALED_QUOTIENTS: dict[str, Function] = {
    "DivBackward1": lambda x: aten.div.Scalar(x, 3.0),
    "DivBackward3": lambda x: aten.div.Scalar_mode(x, 3.0, rounding_mode="floor"),
}
