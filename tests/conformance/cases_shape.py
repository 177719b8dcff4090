"""Layers that move, copy, pad or resample entries, and dropout."""

from __future__ import annotations

from torch import nn

from backpack_core.testing import RuleCase
from tests.conformance.layer import layer

CASES: list[RuleCase] = [
    layer(lambda: nn.Identity(), 2, 2),
    layer(lambda: nn.Flatten(), 2, 2),
    layer(lambda: nn.Flatten(), 4, name="Flatten, of one axis"),
    layer(lambda: nn.Flatten(2), 1, 2, 2),
    layer(lambda: nn.Unflatten(1, (2, 2)), 4),
    layer(lambda: nn.PixelShuffle(2), 4, 1, 2),
    layer(lambda: nn.PixelUnshuffle(2), 1, 2, 4),
    layer(lambda: nn.ChannelShuffle(2), 4, 1, 2),
    layer(lambda: nn.Unfold((1, 2), padding=(0, 1)), 1, 2, 2),
    layer(lambda: nn.Fold((2, 4), (1, 2), stride=(1, 2)), 2, 4),
    layer(lambda: nn.Upsample(scale_factor=2), 1, 2),
    layer(lambda: nn.Upsample(size=5, mode="linear"), 1, 2),
    layer(lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), 1, 2, 2),
    layer(lambda: nn.Upsample(scale_factor=2, mode="bicubic"), 1, 2, 2),
    layer(lambda: nn.UpsamplingNearest2d(scale_factor=2), 1, 1, 2),
    layer(lambda: nn.UpsamplingBilinear2d(scale_factor=2), 1, 2, 2),
    layer(lambda: nn.ConstantPad1d((1, 2), 0.5), 1, 2),
    layer(lambda: nn.ConstantPad2d((1, 0, -1, 1), 0.5), 1, 2, 2),
    layer(lambda: nn.ConstantPad3d(1, 0.0), 1, 1, 1, 2),
    layer(lambda: nn.ZeroPad1d(1), 1, 2),
    layer(lambda: nn.ZeroPad2d((1, 0, 0, 2)), 1, 2, 2),
    layer(lambda: nn.ZeroPad3d((1, 0, 0, 0, 0, 1)), 1, 1, 2, 1),
    layer(lambda: nn.ReflectionPad1d((1, 2)), 1, 4),
    layer(lambda: nn.ReflectionPad2d((1, 0, 0, 1)), 1, 2, 2),
    layer(lambda: nn.ReflectionPad3d((1, 0, 0, 1, 0, 0)), 1, 1, 2, 2),
    layer(lambda: nn.ReplicationPad1d((1, 2)), 1, 2),
    layer(lambda: nn.ReplicationPad2d((1, 0, 0, 1)), 1, 2, 2),
    layer(lambda: nn.ReplicationPad3d((1, 0, 0, 1, 0, 0)), 1, 1, 2, 2),
    layer(lambda: nn.CircularPad1d((1, 2)), 1, 2),
    layer(lambda: nn.CircularPad2d((1, 0, 0, 1)), 1, 2, 2),
    layer(lambda: nn.CircularPad3d((1, 0, 0, 1, 0, 0)), 1, 1, 2, 2),
    layer(lambda: nn.Dropout(0.4), 5),
    layer(lambda: nn.Dropout(0.4, inplace=True), 5, overwrites_input=True),
    layer(lambda: nn.Dropout(0.4).eval(), 5, name="Dropout, evaluation"),
    layer(lambda: nn.Dropout1d(0.4), 4, 2),
    layer(lambda: nn.Dropout2d(0.4), 4, 1, 2),
    layer(lambda: nn.Dropout3d(0.4), 4, 1, 1, 2),
    layer(lambda: nn.AlphaDropout(0.4), 5),
    layer(lambda: nn.FeatureAlphaDropout(0.4), 4, 2),
]
