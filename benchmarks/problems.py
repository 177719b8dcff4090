"""Nets, data and losses of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.residual import resnet18
from benchmarks.transformers import GPT2, Llama, ViT


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
        device: Where the net and its data are.
    """

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    exact_batch: int
    vocabulary: int = 0
    device: str = "cpu"

    def net(self) -> nn.Module:
        """The net, with the same numbers at every call."""
        torch.manual_seed(0)
        return self.model().to(self.device)

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random inputs ``[N, *shape]`` and classes ``[N]``, the same at every call."""
        generator = torch.Generator().manual_seed(1)
        shape = (batch, *self.shape)
        if self.vocabulary:
            x = torch.randint(0, self.vocabulary, shape, generator=generator)
        else:
            x = torch.rand(shape, generator=generator)
        y = torch.randint(0, self.classes, (batch,), generator=generator)
        return x.to(self.device), y.to(self.device)


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
        Problem("resnet18", resnet18, _IMAGE, 10, 16, 4),
        *[
            Problem(f"{name}{suffix}", partial(net, width), shape, 10, 16, 16, vocabulary)
            for width, suffix in ((128, ""), (256, "-256"))
            for name, net, shape, vocabulary in (
                ("gpt2", GPT2, (64,), 512),
                ("llama", Llama, (64,), 512),
                ("vit", ViT, _IMAGE, 0),
            )
        ],
        # Many classes, for quantities with a column for each.
        Problem("vit-100", partial(ViT, classes=100), _IMAGE, 100, 16, 8),
        Problem("vit-1000", partial(ViT, classes=1000), _IMAGE, 1000, 16, 2),
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
