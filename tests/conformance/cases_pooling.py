"""Pooling and unpooling."""

from __future__ import annotations

import torch
from torch import nn

from backpack_core.testing import RuleCase
from tests.conformance.layer import layer, positive


def pooled(n: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What ``MaxUnpool`` of kernel two takes: values, positions, and the size to restore."""
    pool = [nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d][len(shape) - 1]
    whole = torch.randn(n, 1, *shape)
    values, positions = pool(2, return_indices=True)(whole)
    return values, positions, list(whole.shape)


CASES: list[RuleCase] = [
    layer(lambda: nn.AvgPool1d(2), 2, 4),
    layer(lambda: nn.AvgPool1d(2, padding=1, count_include_pad=False), 1, 5),
    layer(lambda: nn.AvgPool2d((1, 2), stride=(1, 1), ceil_mode=True), 1, 2, 4),
    layer(lambda: nn.AvgPool2d(2, divisor_override=5), 1, 2, 4),
    layer(
        lambda: nn.AvgPool3d(2),
        1,
        2,
        2,
        4,
    ),
    layer(lambda: nn.AdaptiveAvgPool1d(2), 2, 5),
    layer(lambda: nn.AdaptiveAvgPool2d((1, None)), 2, 2, 2),
    layer(lambda: nn.AdaptiveAvgPool3d(1), 2, 2, 2, 1),
    layer(lambda: nn.MaxPool1d(2), 2, 4),
    layer(lambda: nn.MaxPool1d(2, return_indices=True), 1, 5, name="MaxPool1d, indices"),
    layer(lambda: nn.MaxPool2d(2, stride=1, padding=1), 1, 2, 2),
    layer(lambda: nn.MaxPool2d((1, 2), dilation=2, ceil_mode=True), 1, 2, 5),
    layer(lambda: nn.MaxPool3d((1, 2, 2)), 1, 2, 2, 4),
    layer(lambda: nn.AdaptiveMaxPool1d(2), 2, 5),
    layer(lambda: nn.AdaptiveMaxPool2d(1), 2, 2, 2),
    layer(lambda: nn.AdaptiveMaxPool3d((1, 2, 1)), 1, 2, 2, 2),
    layer(
        lambda: nn.FractionalMaxPool2d(2, output_size=2, return_indices=True),
        1,
        4,
        4,
        name="FractionalMaxPool2d",
    ),
    layer(
        lambda: nn.FractionalMaxPool3d(2, output_size=2, return_indices=True),
        1,
        4,
        4,
        4,
        name="FractionalMaxPool3d",
    ),
    RuleCase(lambda: nn.MaxUnpool1d(2), lambda n: pooled(n, 4)),
    RuleCase(lambda: nn.MaxUnpool2d(2), lambda n: pooled(n, 2, 4)),
    RuleCase(lambda: nn.MaxUnpool3d(2), lambda n: pooled(n, 2, 2, 4)),
    positive(lambda: nn.LPPool1d(2, 2), 1, 4),
    positive(lambda: nn.LPPool2d(2.5, 2, stride=1), 1, 2, 4),
    positive(lambda: nn.LPPool3d(2, (1, 1, 2)), 1, 2, 1, 4),
]
