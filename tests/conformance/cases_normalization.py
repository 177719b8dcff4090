"""Normalisation layers."""

from __future__ import annotations

from torch import nn

from backpack_core.testing import RuleCase
from tests.conformance.layer import evaluated, layer, randomised

CASES: list[RuleCase] = [
    layer(evaluated(randomised(lambda: nn.BatchNorm1d(4))), 4, name="BatchNorm1d, evaluation"),
    layer(lambda: nn.BatchNorm1d(4), 4, name="BatchNorm1d, training"),
    layer(
        evaluated(randomised(lambda: nn.BatchNorm1d(2, affine=False))),
        2,
        2,
        name="BatchNorm1d, positions, not affine",
    ),
    layer(evaluated(randomised(lambda: nn.BatchNorm2d(2))), 2, 1, 2, name="BatchNorm2d"),
    layer(evaluated(randomised(lambda: nn.BatchNorm3d(2))), 2, 1, 1, 2, name="BatchNorm3d"),
    layer(evaluated(randomised(lambda: nn.SyncBatchNorm(2))), 2, 2, name="SyncBatchNorm"),
    layer(randomised(lambda: nn.LayerNorm(4)), 4),
    layer(randomised(lambda: nn.LayerNorm((2, 2))), 2, 2),
    layer(randomised(lambda: nn.LayerNorm(4, bias=False)), 2, 4),
    layer(lambda: nn.LayerNorm(4, elementwise_affine=False), 4),
    layer(randomised(lambda: nn.RMSNorm(4)), 4),
    layer(randomised(lambda: nn.RMSNorm(4)), 2, 4, name="RMSNorm, positions"),
    layer(randomised(lambda: nn.GroupNorm(2, 4)), 4, 2),
    layer(randomised(lambda: nn.GroupNorm(1, 2)), 2, 2),
    layer(lambda: nn.GroupNorm(1, 4, affine=False), 4),
    layer(randomised(lambda: nn.InstanceNorm1d(2, affine=True)), 2, 4, name="InstanceNorm1d"),
    layer(lambda: nn.InstanceNorm2d(2), 2, 2, 2, name="InstanceNorm2d"),
    layer(
        evaluated(randomised(lambda: nn.InstanceNorm1d(2, track_running_stats=True))),
        2,
        4,
        name="InstanceNorm1d, running statistics",
    ),
    layer(lambda: nn.InstanceNorm3d(1), 1, 2, 2, 2, name="InstanceNorm3d"),
    layer(lambda: nn.LocalResponseNorm(2, alpha=0.5), 4, 1),
    layer(lambda: nn.LocalResponseNorm(5, alpha=0.5, beta=0.6, k=2.0), 4, 2),
]
