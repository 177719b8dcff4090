"""Layers as data, each between two linear layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import Module

from backpack_layers.modules import Slicing
from tests.cases import Problem, classification


@dataclass
class LayerCase:
    """A layer between two linear layers.

    Attributes:
        make: Makes the layer.
        shape: Shape of its input, without the batch axis.
        whole: It draws random numbers.
    """

    make: Callable[[], Module]
    shape: tuple[int, ...]
    whole: bool = False
    id: str = field(init=False)

    def __post_init__(self) -> None:
        text = repr(self.make()).replace(" ", "").replace("\n", "")
        self.id = f"{text}-{'x'.join(map(str, self.shape))}{'-train' if self.whole else ''}"

    def problem(self, batch: int, reduction: str) -> Problem:
        """``Linear``, the layer, ``Flatten``, ``Linear``, and the cross-entropy loss."""
        layer = self.make()
        layer.train(self.whole)
        features = layer(torch.randn(2, *self.shape)).flatten(1).shape[1]
        width = self.shape[-1]
        model = nn.Sequential(
            nn.Linear(width, width, bias=False), layer, nn.Flatten(), nn.Linear(features, 3)
        )
        problem = classification(model, self.shape, batch, reduction=reduction)
        problem.whole = self.whole
        return problem


def _convolutions() -> list[LayerCase]:
    cases = []
    settings: list[dict[str, Any]] = [
        {},
        {"bias": False},
        {"groups": 2},
        {"stride": 2, "padding": 1},
        {"dilation": 2},
        {"padding": "same"},
        {"padding": "same", "dilation": 3},
        {"padding": "valid"},
        *({"padding": 1, "padding_mode": m} for m in ("reflect", "replicate", "circular")),
        {"padding": "same", "padding_mode": "circular"},
    ]
    for conv, extra in ((nn.Conv1d, (5,)), (nn.Conv2d, (4, 3)), (nn.Conv3d, (3, 3, 3))):
        for setting in settings:
            if len(extra) == 3 and setting.get("padding_mode") == "reflect":
                continue  # torch has no reflection of 3d tensors in double precision backward
            options = {"kernel_size": 2, **setting}
            shape = (2, *(size + 1 if "dilation" in setting else size for size in extra))
            cases.append(LayerCase(lambda c=conv, o=options: c(2, 4, **o), shape))
    cases += [
        LayerCase(lambda: nn.Conv1d(2, 2, 3, stride=3, padding=(2,)), (2, 5)),
        LayerCase(
            lambda: nn.Conv2d(2, 2, (1, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
            (2, 4, 3),
        ),
        LayerCase(lambda: nn.Conv2d(2, 2, 2, padding=(0, 1), padding_mode="circular"), (2, 3, 3)),
        LayerCase(
            lambda: nn.Conv3d(2, 2, (1, 2, 2), padding=(1, 0, 1), stride=(2, 1, 1)), (2, 2, 3, 3)
        ),
    ]
    return cases


def _transposed_convolutions() -> list[LayerCase]:
    settings: list[dict[str, Any]] = [
        {},
        {"bias": False},
        {"groups": 2},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"dilation": 2},
    ]
    cases = []
    for conv, extra in (
        (nn.ConvTranspose1d, (4,)),
        (nn.ConvTranspose2d, (3, 2)),
        (nn.ConvTranspose3d, (2, 2, 2)),
    ):
        for setting in settings:
            options = {"kernel_size": 2, **setting}
            cases.append(LayerCase(lambda c=conv, o=options: c(2, 4, **o), (2, *extra)))
    return cases


def _poolings() -> list[LayerCase]:
    cases = []
    for d, shape in ((1, (2, 6)), (2, (2, 5, 4)), (3, (1, 4, 3, 4))):
        maximum, average = getattr(nn, f"MaxPool{d}d"), getattr(nn, f"AvgPool{d}d")
        for options in (
            {},
            {"stride": 1},
            {"padding": 1},
            {"stride": 2, "padding": 1, "ceil_mode": True},
        ):
            cases.append(LayerCase(lambda m=maximum, o=options: m(2, **o), shape))
            cases.append(LayerCase(lambda m=average, o=options: m(2, **o), shape))
        cases.append(LayerCase(lambda m=maximum: m(2, dilation=2, stride=1), shape))
        cases.append(LayerCase(lambda m=average: m(2, padding=1, count_include_pad=False), shape))
    return cases


ACTIVATIONS: list[Callable[[], Module]] = [
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.Sigmoid,
    nn.Tanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.ELU,
    nn.SELU,
    nn.SiLU,
    nn.GELU,
    lambda: nn.GELU("tanh"),
    nn.Softplus,
    nn.Mish,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Hardswish,
    nn.PReLU,
]


LAYERS: list[LayerCase] = [
    LayerCase(lambda: nn.Linear(3, 2), (3,)),
    LayerCase(lambda: nn.Linear(3, 2, bias=False), (3,)),
    LayerCase(lambda: nn.Linear(3, 2), (2, 3)),
    LayerCase(lambda: nn.Linear(2, 3), (2, 3, 2)),
    *_convolutions(),
    *_transposed_convolutions(),
    *_poolings(),
    *(LayerCase(make, (4,)) for make in ACTIVATIONS),
    LayerCase(nn.ReLU, (2, 3)),
    LayerCase(nn.Flatten, (2, 3)),
    LayerCase(lambda: nn.Flatten(2), (2, 3, 2)),
    LayerCase(nn.Flatten, (3,)),
    LayerCase(nn.Identity, (3,)),
    LayerCase(lambda: Slicing((slice(None), slice(0, 2))), (3,)),
    LayerCase(lambda: Slicing((slice(None), 1)), (3, 2)),
    LayerCase(lambda: nn.Dropout(0.5), (6,)),
    LayerCase(lambda: nn.Dropout(0.5), (6,), whole=True),
]
