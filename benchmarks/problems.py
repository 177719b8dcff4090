"""Nets, data and losses of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Problem:
    """A net on random data with the mean cross-entropy loss.

    Attributes:
        name: How it is called on the command line.
        model: Makes the net.
        shape: Shape of one input.
        classes: Number of outputs ``C``.
        batch: Number of samples ``N``.
        exact_batch: Number of samples for quantities with a column for every class.
        vocabulary: Number of tokens, for inputs that are tokens.
    """

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    exact_batch: int
    vocabulary: int = 0

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random inputs ``[N, *shape]`` and classes ``[N]``, the same at every call."""
        generator = torch.Generator().manual_seed(1)
        shape = (batch, *self.shape)
        if self.vocabulary:
            x = torch.randint(0, self.vocabulary, shape, generator=generator)
        else:
            x = torch.rand(shape, generator=generator)
        return x, torch.randint(0, self.classes, (batch,), generator=generator)


def logistic_regression() -> nn.Module:
    """784 → 10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp(widths: Sequence[int] = (512, 256), classes: int = 10) -> nn.Module:
    """784 → 512 → 256 → 10 with sigmoids."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise((784, *widths)):
        layers += [nn.Linear(before, after), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def net_2c2d() -> nn.Module:
    """Two convolutions and two linear layers on 1 × 28 × 28 (DeepOBS's 2C2D)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 1024), nn.ReLU(), nn.Linear(1024, 10),
    )  # fmt: skip


def net_3c3d(classes: int = 10) -> nn.Module:
    """Three convolutions and three linear layers on 3 × 32 × 32 (DeepOBS's 3C3D)."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Flatten(), nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
        nn.Linear(256, classes),
    )  # fmt: skip


def all_cnn_c() -> nn.Module:
    """Nine convolutions on 3 × 32 × 32, 100 classes (Springenberg et al., 2015)."""

    def layer(*args: int, **options: int) -> list[nn.Module]:
        return [nn.Conv2d(*args, **options), nn.ReLU()]

    return nn.Sequential(
        *layer(3, 96, 3, padding=1), *layer(96, 96, 3, padding=1),
        *layer(96, 96, 3, padding=1, stride=2),
        *layer(96, 192, 3, padding=1), *layer(192, 192, 3, padding=1),
        *layer(192, 192, 3, padding=1, stride=2),
        *layer(192, 192, 3), *layer(192, 192, 1), *layer(192, 100, 1),
        nn.AvgPool2d(6), nn.Flatten(),
    )  # fmt: skip


class _Classifier(nn.Module):
    """A Transformer encoder, the mean over tokens, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(x).mean(1))
        return result


class _Block(nn.Module):
    """A pre-norm Transformer block of plain linear layers, with torch's fused attention."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projections(self.before_attention(x))
        query, key, value = projected.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(context.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.before_mlp(x))
        return result


class _GPT2(nn.Module):
    """GPT-2 on 64 tokens with a classifier of the last one: 4 layers."""

    def __init__(self, width: int = 128, vocabulary: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*[_Block(width, 4, is_causal=True) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand(x.shape)
        hidden = self.blocks(self.tokens(x) + self.positions(places))
        result: Tensor = self.head(self.norm(hidden)[:, -1])
        return result


class _ViT(nn.Module):
    """A vision Transformer on patches of 4 × 4, with the mean over tokens: 4 layers."""

    def __init__(self, width: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*[_Block(width, 4, is_causal=False) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        result: Tensor = self.head(self.norm(hidden).mean(1))
        return result


_IMAGE = (3, 32, 32)
PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("logreg", logistic_regression, (784,), 10, 128, 128),
        Problem("mlp", mlp, (784,), 10, 128, 128),
        Problem("2c2d", net_2c2d, (1, 28, 28), 10, 64, 64),
        Problem("3c3d", net_3c3d, _IMAGE, 10, 64, 64),
        Problem("allcnnc", all_cnn_c, _IMAGE, 100, 64, 16),
        Problem("transformer", _Classifier, (64, 128), 10, 16, 16),
        Problem("gpt2", _GPT2, (64,), 10, 16, 16, vocabulary=512),
        Problem("vit", _ViT, _IMAGE, 10, 16, 16),
        # Many classes, for quantities with a column for each.
        Problem("vit-100", partial(_ViT, classes=100), _IMAGE, 100, 16, 8),
        Problem("vit-1000", partial(_ViT, classes=1000), _IMAGE, 1000, 16, 2),
        Problem("3c3d-100", partial(net_3c3d, 100), _IMAGE, 100, 64, 16),
        Problem("3c3d-1000", partial(net_3c3d, 1000), _IMAGE, 1000, 64, 4),
    )
}


def find(name: str) -> Problem:
    """A problem by name; ``"mlp/classes=20"`` and ``"mlp/depth=3"`` are variants of the MLP.

    With a depth, every hidden layer is 256 wide.
    """
    if name in PROBLEMS:
        return PROBLEMS[name]
    key, value = name.removeprefix("mlp/").split("=")
    if key == "depth":
        return replace(PROBLEMS["mlp"], name=name, model=partial(mlp, (256,) * int(value)))
    classes = int(value)
    return replace(PROBLEMS["mlp"], name=name, model=partial(mlp, classes=classes), classes=classes)
