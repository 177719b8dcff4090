"""ResNet-18 (He et al., 2016) for images of 32 × 32, with group normalisation.

Batch normalisation in train mode has no individual gradients: as is usual where these are needed,
each is replaced by one over groups of channels.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

_WIDTHS = (64, 128, 256, 512)


class _Block(nn.Module):
    """Two convolutions, and what they are added to."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(32, after) for _ in range(2))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            down = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(down, nn.GroupNorm(32, after))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(hidden)) + self.shortcut(x))


def resnet18(classes: int = 10) -> nn.Module:
    """Eight blocks of two convolutions each."""
    befores = [64, *[width for width in _WIDTHS for _ in range(2)][:-1]]
    afters = [width for width in _WIDTHS for _ in range(2)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU(),
        *[_Block(before, after) for before, after in zip(befores, afters, strict=True)],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes),
    )  # fmt: skip
