"""One small example of every layer and loss in the support matrix, by torch type.

No rule is named here: the matrix finds out which examples have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core.plugins.registry import registry
from backpack_core.testing.cases import LossCase, RuleCase

Made = tuple[type[nn.Module], tuple[Any, ...], tuple[int, ...]]  # type, arguments, shape of input

_PLAIN: dict[str, list[Made]] = {
    "Linear maps": [
        (nn.Linear, (4, 2), (4,)),
        (nn.Conv1d, (2, 2, 2), (2, 4)),
        (nn.Conv2d, (1, 2, 2), (1, 2, 4)),
        (nn.Conv3d, (1, 2, 2), (1, 2, 2, 2)),
        (nn.ConvTranspose1d, (2, 2, 2), (2, 2)),
        (nn.ConvTranspose2d, (1, 2, 2), (1, 2, 1)),
        (nn.ConvTranspose3d, (1, 2, (2, 1, 1)), (1, 1, 2, 2)),
    ],
    "Activations": [
        *(
            (kind, (), (4,))
            for kind in (
                nn.ReLU,
                nn.ReLU6,
                nn.LeakyReLU,
                nn.RReLU,
                nn.PReLU,
                nn.ELU,
                nn.CELU,
                nn.SELU,
                nn.GELU,
                nn.SiLU,
                nn.Mish,
                nn.Sigmoid,
                nn.LogSigmoid,
                nn.Tanh,
                nn.Tanhshrink,
                nn.Hardtanh,
                nn.Hardsigmoid,
                nn.Hardswish,
                nn.Hardshrink,
                nn.Softshrink,
                nn.Softsign,
                nn.Softplus,
                nn.GLU,
            )
        ),
        (nn.Threshold, (0.1, 0.2), (4,)),
        (nn.Softmax, (1,), (4,)),
        (nn.Softmin, (1,), (4,)),
        (nn.LogSoftmax, (1,), (4,)),
        (nn.Softmax2d, (), (2, 1, 2)),
    ],
    "Pooling": [
        (nn.MaxPool1d, (2,), (1, 4)),
        (nn.MaxPool2d, (2,), (1, 2, 4)),
        (nn.MaxPool3d, (2,), (1, 2, 2, 4)),
        (nn.AvgPool1d, (2,), (1, 4)),
        (nn.AvgPool2d, (2,), (1, 2, 4)),
        (nn.AvgPool3d, (2,), (1, 2, 2, 4)),
        (nn.AdaptiveMaxPool1d, (2,), (1, 4)),
        (nn.AdaptiveMaxPool2d, (1,), (2, 2, 2)),
        (nn.AdaptiveMaxPool3d, (1,), (2, 2, 2, 1)),
        (nn.AdaptiveAvgPool1d, (2,), (1, 4)),
        (nn.AdaptiveAvgPool2d, (1,), (2, 2, 2)),
        (nn.AdaptiveAvgPool3d, (1,), (2, 2, 2, 1)),
        (nn.LPPool1d, (2, 2), (1, 4)),
        (nn.LPPool2d, (2, 2), (1, 2, 4)),
        (nn.LPPool3d, (2, (1, 1, 2)), (1, 1, 2, 4)),
    ],
    "Normalisation": [
        (nn.LayerNorm, (4,), (4,)),
        (nn.RMSNorm, (4,), (4,)),
        (nn.GroupNorm, (1, 4), (4,)),
        (nn.InstanceNorm1d, (2, 1e-5, 0.1, True), (2, 4)),
        (nn.InstanceNorm2d, (1, 1e-5, 0.1, True), (1, 2, 2)),
        (nn.InstanceNorm3d, (1, 1e-5, 0.1, True), (1, 2, 2, 1)),
        (nn.LocalResponseNorm, (2,), (4, 1)),
    ],
    "Shapes, padding, dropout": [
        (nn.Identity, (), (4,)),
        (nn.Flatten, (), (2, 2)),
        (nn.Unflatten, (1, (2, 2)), (4,)),
        (nn.Unfold, (2,), (1, 2, 4)),
        (nn.Fold, ((1, 4), (1, 2), 1, 0, (1, 2)), (2, 2)),
        (nn.PixelShuffle, (2,), (4, 1, 1)),
        (nn.PixelUnshuffle, (2,), (1, 2, 2)),
        (nn.ChannelShuffle, (2,), (4, 1)),
        (nn.Upsample, (None, 2), (1, 2)),
        (nn.UpsamplingNearest2d, (None, 2), (1, 1, 2)),
        (nn.UpsamplingBilinear2d, (None, 2), (1, 1, 2)),
        *(
            (getattr(nn, f"{kind}Pad{dims}d"), (1, *([0.5] if kind == "Constant" else [])), shape)
            for kind in ("Constant", "Zero", "Reflection", "Replication", "Circular")
            for dims, shape in ((1, (1, 2)), (2, (1, 2, 2)), (3, (1, 2, 2, 2)))
        ),
        (nn.Dropout, (0.4,), (4,)),
        (nn.Dropout1d, (0.4,), (4, 1)),
        (nn.Dropout2d, (0.4,), (4, 1, 1)),
        (nn.Dropout3d, (0.4,), (4, 1, 1, 1)),
        (nn.AlphaDropout, (0.4,), (4,)),
        (nn.FeatureAlphaDropout, (0.4,), (4, 1)),
    ],
}


def _case(kind: type[nn.Module], arguments: tuple[Any, ...], shape: tuple[int, ...]) -> RuleCase:
    return RuleCase(
        lambda: kind(*arguments), lambda n: 0.1 + torch.rand(n, *shape), name=kind.__name__
    )


def _known(name: str) -> Any:
    """A module class that an installed plugin defines, together with a rule for it."""
    return next(k for k in registry.rules if isinstance(k, type) and k.__name__ == name)


class WithoutRule(nn.Module):
    """What users write, without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self, input: Tensor) -> Tensor:
        """A linear map; no rule says that it is linear."""
        return input @ self.weight


def _named(name: str, factory: Callable[[], nn.Module], inputs: Callable[[int], Any]) -> RuleCase:
    return RuleCase(factory, inputs, name=name)


def _unpool(kind: type[nn.Module], dims: int) -> RuleCase:
    pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1]

    def inputs(n: int) -> tuple[Tensor, Tensor]:
        values: tuple[Tensor, Tensor] = pool(2, return_indices=True)(torch.rand(n, 1, *[2] * dims))
        return values

    return _named(kind.__name__, lambda: kind(2), inputs)


def _tokens(n: int) -> Tensor:
    return torch.randint(0, 5, (n, 2))


def _sequence(n: int) -> Tensor:
    return torch.randn(n, 2, 2)


_OTHERS: dict[str, list[RuleCase]] = {
    "Linear maps": [
        _named(
            "Bilinear", lambda: nn.Bilinear(2, 2, 2), lambda n: (torch.rand(n, 2), torch.rand(n, 2))
        )
    ],
    "Pooling": [
        *(
            _named(
                kind.__name__,
                lambda kind=kind: kind(2, output_size=2, return_indices=True),  # type: ignore[misc]
                lambda n, dims=dims: torch.rand(n, 1, *[4] * dims),  # type: ignore[misc]
            )
            for kind, dims in ((nn.FractionalMaxPool2d, 2), (nn.FractionalMaxPool3d, 3))
        ),
        _unpool(nn.MaxUnpool1d, 1),
        _unpool(nn.MaxUnpool2d, 2),
        _unpool(nn.MaxUnpool3d, 3),
    ],
    "Normalisation": [
        *(
            _named(
                f"{kind.__name__} ({mode})",
                lambda kind=kind, mode=mode: kind(2).train(mode == "training"),  # type: ignore[misc]
                lambda n, shape=shape: torch.rand(n, 2, *shape),  # type: ignore[misc]
            )
            for kind, shape in ((nn.BatchNorm1d, ()), (nn.BatchNorm2d, (1, 2)))
            for mode in ("evaluation", "training")
        ),
    ],
    "Sequences": [
        _named("Embedding", lambda: nn.Embedding(5, 2), _tokens),
        _named("EmbeddingBag", lambda: nn.EmbeddingBag(5, 2, mode="sum"), _tokens),
        _named("RNN", lambda: nn.RNN(2, 2, batch_first=True), _sequence),
        _named("LSTM", lambda: nn.LSTM(2, 2, batch_first=True), _sequence),
        _named("GRU", lambda: nn.GRU(2, 2, batch_first=True), _sequence),
        *(
            _named(kind.__name__, lambda kind=kind: kind(2, 2), lambda n: torch.randn(n, 2))  # type: ignore[misc]
            for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)
        ),
        _named(
            "MultiheadAttention",
            lambda: nn.MultiheadAttention(2, 1, batch_first=True),
            lambda n: (_sequence(n), _sequence(n), _sequence(n)),
        ),
        _named(
            "TransformerEncoderLayer",
            lambda: nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True),
            _sequence,
        ),
    ],
    "Helper modules": [
        _named("ScaleModule", lambda: _known("ScaleModule")(0.7, optimize=True), _sequence),
        _named("SumModule", lambda: _known("SumModule")(), lambda n: (_sequence(n), _sequence(n))),
        _named("Permute", lambda: _known("Permute")(0, 2, 1), _sequence),
        _named("Pad", lambda: _known("Pad")((1, 1)), _sequence),
        _named("Slicing", lambda: _known("Slicing")((slice(None), 0)), _sequence),
        _named(
            "ReduceTuple",
            lambda: _known("ReduceTuple")(),
            lambda n: ((_sequence(n), torch.rand(n, 2)),),
        ),
        _named("A module without a rule", WithoutRule, lambda n: torch.randn(n, 2)),
    ],
}

LAYERS: dict[str, list[RuleCase]] = {
    family: [*(_case(*made) for made in _PLAIN.get(family, [])), *_OTHERS.get(family, [])]
    for family in dict.fromkeys([*_PLAIN, *_OTHERS])
}


def _loss(
    kind: Callable[..., nn.Module],
    target: Callable[[int], Tensor],
    *further: Callable[[int], Tensor],
) -> LossCase:
    return LossCase(
        kind,
        lambda n: (0.1 + 0.8 * torch.rand(n, 2), target(n), *(make(n) for make in further)),
        name=kind.__name__,
    )


def _unit(n: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(n, 2)


def _classes(n: int) -> Tensor:
    return torch.arange(n) % 2


LOSSES: list[LossCase] = [
    _loss(nn.MSELoss, _unit),
    _loss(nn.CrossEntropyLoss, _classes),
    _loss(nn.BCEWithLogitsLoss, _unit),
    _loss(nn.BCELoss, _unit),
    _loss(nn.L1Loss, _unit),
    _loss(nn.SmoothL1Loss, _unit),
    _loss(nn.HuberLoss, _unit),
    _loss(nn.NLLLoss, _classes),
    _loss(nn.KLDivLoss, _unit),
    _loss(nn.PoissonNLLLoss, _unit),
    _loss(nn.GaussianNLLLoss, _unit, _unit),
    _loss(nn.SoftMarginLoss, lambda n: 2.0 * (_unit(n) > 0.5) - 1),
    _loss(nn.MultiLabelSoftMarginLoss, lambda n: 1.0 * (_unit(n) > 0.5)),
    _loss(nn.HingeEmbeddingLoss, lambda n: 2.0 * (_unit(n) > 0.5) - 1),
    LossCase(
        lambda **options: _known("CausalLMLoss")(**options),
        lambda n: (torch.randn(n, 3, 2), torch.randint(0, 2, (n, 3))),
        name="CausalLMLoss",
    ),
]
