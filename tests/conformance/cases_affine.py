"""Linear layers, convolutions and transposed convolutions."""

from __future__ import annotations

import torch
from torch import nn

from backpack_core.testing import RuleCase
from tests.conformance.layer import layer

CASES: list[RuleCase] = [
    layer(lambda: nn.Linear(4, 2), 4),
    layer(lambda: nn.Linear(2, 4, bias=False), 2),
    layer(lambda: nn.Linear(2, 4), 2, 2, name="Linear, positions"),
    layer(lambda: nn.Linear(2, 1), 1, 2, 2, name="Linear, two axes of positions"),
    RuleCase(
        lambda: nn.Bilinear(2, 4, 2),
        lambda n: (torch.randn(n, 2), torch.randn(n, 4)),
        expected_failures={"autocast": "torch wants inputs and weight in one dtype"},
    ),
    RuleCase(
        lambda: nn.Bilinear(2, 1, 2, bias=False),
        lambda n: (torch.randn(n, 2, 2), torch.randn(n, 2, 1)),
        name="Bilinear, positions",
        expected_failures={"autocast": "torch wants inputs and weight in one dtype"},
    ),
    layer(lambda: nn.Conv1d(2, 4, 2), 2, 4),
    layer(lambda: nn.Conv1d(2, 2, 2, stride=2, padding=1, dilation=2, groups=2), 2, 5),
    layer(lambda: nn.Conv1d(2, 2, 3, padding="same", bias=False), 2, 4),
    layer(lambda: nn.Conv2d(2, 1, (1, 2)), 2, 2, 4),
    layer(lambda: nn.Conv2d(4, 2, 2, groups=2, stride=(1, 2), padding=(1, 0)), 4, 2, 2),
    layer(
        lambda: nn.Conv2d(1, 2, 2, padding=1, padding_mode="circular"),
        1,
        2,
        2,
        name="Conv2d, circular",
    ),
    layer(
        lambda: nn.Conv2d(1, 2, 2, padding=1, padding_mode="reflect"),
        1,
        2,
        2,
        name="Conv2d, reflect",
    ),
    layer(lambda: nn.Conv3d(1, 2, 2, padding=(0, 1, 0)), 1, 2, 2, 2),
    layer(lambda: nn.ConvTranspose1d(2, 4, 2), 2, 2),
    layer(
        lambda: nn.ConvTranspose1d(2, 4, 2, stride=2, padding=1, output_padding=1, groups=2), 2, 4
    ),
    layer(lambda: nn.ConvTranspose1d(2, 1, 2, dilation=2, bias=False), 2, 2),
    layer(lambda: nn.ConvTranspose2d(2, 2, (2, 1), stride=(2, 1), groups=2), 2, 2, 2),
    layer(lambda: nn.ConvTranspose3d(1, 2, (2, 1, 1)), 1, 1, 2, 2),
]
