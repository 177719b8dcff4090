"""One small example of every layer and loss in the support matrix, by torch type.

No rule is named here: the matrix finds out which layers have one.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backpack_core.plugins.loading import missing
from backpack_core.plugins.registry import registry
from backpack_core.testing.cases import LossCase, RuleCase

# Layers of one input: type, arguments, and the shape of a sample, if it is not 4.
_PLAIN = {
    "Linear maps": """
        Linear(4, 2); Conv1d(2, 2, 2) 2, 4; Conv2d(1, 2, 2) 1, 2, 4; Conv3d(1, 2, 2) 1, 2, 2, 2;
        ConvTranspose1d(2, 2, 2) 2, 2; ConvTranspose2d(1, 2, 2) 1, 2, 1;
        ConvTranspose3d(1, 2, (2, 1, 1)) 1, 1, 2, 2""",
    "Activations": """
        ReLU(); ReLU6(); LeakyReLU(); RReLU(); PReLU(); ELU(); CELU(); SELU(); GELU(); SiLU();
        Mish(); Sigmoid(); LogSigmoid(); Tanh(); Tanhshrink(); Hardtanh(); Hardsigmoid();
        Hardswish(); Hardshrink(); Softshrink(); Softsign(); Softplus(); GLU();
        Threshold(0.1, 0.2); Softmax(1,); Softmin(1,); LogSoftmax(1,); Softmax2d() 2, 1, 2""",
    "Pooling": """
        MaxPool1d(2,) 1, 4; MaxPool2d(2,) 1, 2, 4; MaxPool3d(2,) 1, 2, 2, 4;
        AvgPool1d(2,) 1, 4; AvgPool2d(2,) 1, 2, 4; AvgPool3d(2,) 1, 2, 2, 4;
        AdaptiveMaxPool1d(2,) 1, 4; AdaptiveMaxPool2d(1,) 2, 2, 2; AdaptiveMaxPool3d(1,) 2, 2, 2, 1;
        AdaptiveAvgPool1d(2,) 1, 4; AdaptiveAvgPool2d(1,) 2, 2, 2; AdaptiveAvgPool3d(1,) 2, 2, 2, 1;
        LPPool1d(2, 2) 1, 4; LPPool2d(2, 2) 1, 2, 4; LPPool3d(2, (1, 1, 2)) 1, 1, 2, 4""",
    "Normalisation": """
        LayerNorm(4,); RMSNorm(4,); GroupNorm(1, 4); InstanceNorm1d(2, 1e-5, 0.1, True) 2, 4;
        InstanceNorm2d(1, 1e-5, 0.1, True) 1, 2, 2; InstanceNorm3d(1, 1e-5, 0.1, True) 1, 2, 2, 1;
        LocalResponseNorm(2,) 4, 1""",
    "Shapes, padding, dropout": """
        Identity(); Flatten() 2, 2; Unflatten(1, (2, 2)); Unfold(2,) 1, 2, 4;
        Fold((1, 4), (1, 2), 1, 0, (1, 2)) 2, 2; PixelShuffle(2,) 4, 1, 1;
        PixelUnshuffle(2,) 1, 2, 2; ChannelShuffle(2,) 4, 1; Upsample(None, 2) 1, 2;
        UpsamplingNearest2d(None, 2) 1, 1, 2; UpsamplingBilinear2d(None, 2) 1, 1, 2;
        ConstantPad1d(1, 0.5) 1, 2; ConstantPad2d(1, 0.5) 1, 2, 2; ConstantPad3d(1, 0.5) 1, 2, 2, 2;
        ZeroPad1d(1,) 1, 2; ZeroPad2d(1,) 1, 2, 2; ZeroPad3d(1,) 1, 2, 2, 2;
        ReflectionPad1d(1,) 1, 2; ReflectionPad2d(1,) 1, 2, 2; ReflectionPad3d(1,) 1, 2, 2, 2;
        ReplicationPad1d(1,) 1, 2; ReplicationPad2d(1,) 1, 2, 2; ReplicationPad3d(1,) 1, 2, 2, 2;
        CircularPad1d(1,) 1, 2; CircularPad2d(1,) 1, 2, 2; CircularPad3d(1,) 1, 2, 2, 2;
        Dropout(0.4,); Dropout1d(0.4,) 4, 1; Dropout2d(0.4,) 4, 1, 1; Dropout3d(0.4,) 4, 1, 1, 1;
        AlphaDropout(0.4,); FeatureAlphaDropout(0.4,) 4, 1""",
}


def _plain(family: str) -> Iterator[RuleCase]:
    for entry in filter(None, map(str.strip, _PLAIN.get(family, "").split(";"))):
        name, _, rest = entry.partition("(")
        arguments, _, shape = rest.rpartition(")")
        make = partial(getattr(nn, name), *literal_eval(f"({arguments})"))
        yield RuleCase(make, partial(_positive, literal_eval(f"({shape or 4},)")))


def _positive(sizes: tuple[int, ...], n: int) -> Tensor:
    return 0.1 + torch.rand(n, *sizes)


def _known(name: str, *arguments: Any, **options: Any) -> nn.Module:
    """A module of a class that a plugin defines together with its rule."""
    types: dict[str, Any] = {k.__name__: k for k in registry.rules if isinstance(k, type)}
    if name not in types:
        raise missing("The table has layers of torch.nn, and no rules for them.", nn.Linear)
    made: nn.Module = types[name](*arguments, **options)
    return made


class WithoutRule(nn.Module):
    """A user's module without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self, input: Tensor) -> Tensor:
        """A linear map, though no rule declares that."""
        return input @ self.weight


def _unpooled(dims: int) -> Callable[[int], Any]:
    pool: Any = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1]
    return lambda n: pool(2, return_indices=True)(torch.rand(n, 1, *[2] * dims))


def _drawn(*shape: int, times: int = 1) -> Callable[[int], tuple[Tensor, ...]]:
    """Inputs that are random tensors."""
    return lambda n: tuple(torch.randn(n, *shape) for _ in range(times))


def _numbers(n: int) -> Tensor:
    return torch.randint(0, 5, (n, 2))


def _norms(kind: type[nn.Module], *shape: int) -> Iterator[RuleCase]:
    for mode in ("evaluation", "training"):
        make = lambda mode=mode: kind(2).train(mode == "training")  # noqa: E731
        yield RuleCase(make, _drawn(2, *shape), name=f"{kind.__name__} ({mode})")


_SEQUENCE = _drawn(2, 2)
_OTHERS: dict[str, list[RuleCase]] = {
    "Linear maps": [RuleCase(partial(nn.Bilinear, 2, 2, 2), _drawn(2, times=2))],
    "Pooling": [
        *(
            RuleCase(partial(kind, 2, output_size=2, return_indices=True), _drawn(1, *[4] * dims))
            for kind, dims in ((nn.FractionalMaxPool2d, 2), (nn.FractionalMaxPool3d, 3))
        ),
        *(RuleCase(partial(getattr(nn, f"MaxUnpool{d}d"), 2), _unpooled(d)) for d in (1, 2, 3)),
    ],
    "Normalisation": [*_norms(nn.BatchNorm1d), *_norms(nn.BatchNorm2d, 1, 2)],
    "Sequences": [
        RuleCase(partial(nn.Embedding, 5, 2), _numbers),
        RuleCase(partial(nn.EmbeddingBag, 5, 2, mode="sum"), _numbers),
        *(
            RuleCase(partial(kind, 2, 2, batch_first=True), _SEQUENCE)
            for kind in (nn.RNN, nn.LSTM, nn.GRU)
        ),
        *(RuleCase(partial(k, 2, 2), _drawn(2)) for k in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)),
        RuleCase(partial(nn.MultiheadAttention, 2, 1, batch_first=True), _drawn(2, 2, times=3)),
        RuleCase(
            partial(nn.TransformerEncoderLayer, 2, 1, 2, dropout=0.0, batch_first=True), _SEQUENCE
        ),
    ],
    "Helper modules": [
        RuleCase(partial(_known, "ScaleModule", 0.7, True), _SEQUENCE),
        RuleCase(partial(_known, "SumModule"), _drawn(2, 2, times=2)),
        RuleCase(partial(_known, "Permute", 0, 2, 1), _SEQUENCE),
        RuleCase(partial(_known, "Pad", (1, 1)), _SEQUENCE),
        RuleCase(partial(_known, "Slicing", (slice(None), 0)), _SEQUENCE),
        RuleCase(partial(_known, "ReduceTuple"), lambda n: (_drawn(2, times=2)(n),)),
        RuleCase(partial(_known, "Perturbation", (2,), torch.zeros(0)), _drawn(2)),
        RuleCase(WithoutRule, _drawn(2), name="A module without a rule"),
    ],
}

LAYERS: dict[str, list[RuleCase]] = {
    family: [*_plain(family), *_OTHERS.get(family, [])]
    for family in dict.fromkeys([*_PLAIN, *_OTHERS])
}


def _unit(n: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(n, 2)


def _sign(n: int) -> Tensor:
    return 2.0 * (_unit(n) > 0.5) - 1


def _classes(n: int) -> Tensor:
    return torch.arange(n) % 2


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().flatten(1).sum(1)


def _losses(
    *kinds: Callable[..., nn.Module], of: Sequence[Any] = (), **more: Any
) -> list[LossCase]:
    """A case for each of several losses, whose further arguments are made by ``of``."""
    inputs = lambda n: (_unit(n), *(make(n) for make in of))  # noqa: E731
    return [LossCase(kind, inputs, **more) for kind in kinds]


LOSSES: list[LossCase] = [
    *_losses(nn.MSELoss, of=[_unit]),
    *_losses(nn.CrossEntropyLoss, of=[_classes]),
    *_losses(nn.BCEWithLogitsLoss, nn.BCELoss, nn.L1Loss, nn.SmoothL1Loss, of=[_unit]),
    *_losses(nn.HuberLoss, of=[_unit]),
    *_losses(nn.NLLLoss, of=[_classes]),
    *_losses(nn.KLDivLoss, nn.PoissonNLLLoss, of=[_unit]),
    *_losses(nn.GaussianNLLLoss, of=[_unit, _unit]),
    *_losses(nn.SoftMarginLoss, of=[_sign]),
    *_losses(nn.MultiLabelSoftMarginLoss, of=[lambda n: 1.0 * (_unit(n) > 0.5)]),
    *_losses(nn.HingeEmbeddingLoss, of=[_sign]),
    LossCase(
        partial(_known, "CausalLMLoss"),
        lambda n: (torch.randn(n, 3, 2), torch.randint(0, 2, (n, 3))),
    ),
    *_losses(partial(_known, "AutodiffLoss", _squares), of=[_unit], sampled=False),
    *_losses(partial(_known, "SumOutputs"), sampled=False),
]
