"""One small example of every layer and loss in the support matrix, by torch type.

No rule is named here: the matrix finds out which layers have one.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator
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
    for entry in _PLAIN.get(family, "").split(";"):
        name, _, rest = entry.strip().partition("(")
        arguments, _, shape = rest.rpartition(")")
        if name:
            kind, sizes = getattr(nn, name), literal_eval(f"({shape or 4},)")
            given = literal_eval(f"({arguments})")
            yield _case(name, kind, given, partial(_positive, sizes))


def _positive(sizes: tuple[int, ...], n: int) -> Tensor:
    return 0.1 + torch.rand(n, *sizes)


def _case(
    name: str, kind: Callable[..., Any], arguments: tuple[Any, ...], inputs: Callable[[int], Any]
) -> RuleCase:
    return RuleCase(lambda: kind(*arguments), inputs, name=name)


def _known(name: str) -> Callable[..., nn.Module]:
    """A factory of a module class by name, which a plugin defines together with its rule."""

    def make(*arguments: Any, **options: Any) -> nn.Module:
        types: dict[str, Any] = {k.__name__: k for k in registry.rules if isinstance(k, type)}
        if name not in types:
            raise missing("The table has layers of torch.nn, and no rules for them.", nn.Linear)
        made: nn.Module = types[name](*arguments, **options)
        return made

    return make


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


def _drawn(*shape: int, times: int = 0) -> Callable[[int], Any]:
    """Inputs that are one random tensor, or several."""

    def inputs(n: int) -> Any:
        several = tuple(torch.randn(n, *shape) for _ in range(times or 1))
        return several if times else several[0]

    return inputs


def _numbers(n: int) -> Tensor:
    return torch.randint(0, 5, (n, 2))


def _norm(kind: type[nn.Module], mode: str, *shape: int) -> RuleCase:
    name = f"{kind.__name__} ({mode})"
    return _case(name, lambda: kind(2).train(mode == "training"), (), _drawn(2, *shape))


def _fractional(kind: type[nn.Module], dims: int) -> RuleCase:
    make = lambda: kind(2, output_size=2, return_indices=True)  # noqa: E731
    return _case(kind.__name__, make, (), _drawn(1, *[4] * dims))


_MODES = ("evaluation", "training")
_OTHERS: dict[str, list[RuleCase]] = {
    "Linear maps": [_case("Bilinear", nn.Bilinear, (2, 2, 2), _drawn(2, times=2))],
    "Pooling": [
        _fractional(nn.FractionalMaxPool2d, 2),
        _fractional(nn.FractionalMaxPool3d, 3),
        *(
            _case(f"MaxUnpool{d}d", getattr(nn, f"MaxUnpool{d}d"), (2,), _unpooled(d))
            for d in (1, 2, 3)
        ),
    ],
    "Normalisation": [
        *(_norm(nn.BatchNorm1d, mode) for mode in _MODES),
        *(_norm(nn.BatchNorm2d, mode, 1, 2) for mode in _MODES),
    ],
    "Sequences": [
        _case("Embedding", nn.Embedding, (5, 2), _numbers),
        _case("EmbeddingBag", partial(nn.EmbeddingBag, mode="sum"), (5, 2), _numbers),
        *(
            _case(k.__name__, partial(k, 2, 2, batch_first=True), (), _drawn(2, 2))
            for k in (nn.RNN, nn.LSTM, nn.GRU)
        ),
        *(_case(k.__name__, k, (2, 2), _drawn(2)) for k in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)),
        _case(
            "MultiheadAttention",
            lambda: nn.MultiheadAttention(2, 1, batch_first=True),
            (),
            _drawn(2, 2, times=3),
        ),
        _case(
            "TransformerEncoderLayer",
            lambda: nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True),
            (),
            _drawn(2, 2),
        ),
    ],
    "Helper modules": [
        _case("ScaleModule", _known("ScaleModule"), (0.7, True), _drawn(2, 2)),
        _case("SumModule", _known("SumModule"), (), _drawn(2, 2, times=2)),
        _case("Permute", _known("Permute"), (0, 2, 1), _drawn(2, 2)),
        _case("Pad", _known("Pad"), ((1, 1),), _drawn(2, 2)),
        _case("Slicing", _known("Slicing"), ((slice(None), 0),), _drawn(2, 2)),
        _case("ReduceTuple", _known("ReduceTuple"), (), lambda n: (_drawn(2, times=2)(n),)),
        _case("Perturbation", _known("Perturbation"), ((2,), torch.zeros(0)), _drawn(2)),
        _case("A module without a rule", WithoutRule, (), _drawn(2)),
    ],
}

LAYERS: dict[str, list[RuleCase]] = {
    family: [*_plain(family), *_OTHERS.get(family, [])]
    for family in dict.fromkeys([*_PLAIN, *_OTHERS])
}


def _unit(n: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(n, 2)


def _loss(kind: Callable[..., nn.Module], *further: Callable[[int], Tensor]) -> LossCase:
    inputs = lambda n: (_unit(n), *(make(n) for make in further))  # noqa: E731
    return LossCase(kind, inputs, name=kind.__name__)


def _sign(n: int) -> Tensor:
    return 2.0 * (_unit(n) > 0.5) - 1


def _classes(n: int) -> Tensor:
    return torch.arange(n) % 2


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().flatten(1).sum(1)


LOSSES: list[LossCase] = [
    _loss(nn.MSELoss, _unit),
    _loss(nn.CrossEntropyLoss, _classes),
    *(_loss(k, _unit) for k in (nn.BCEWithLogitsLoss, nn.BCELoss, nn.L1Loss, nn.SmoothL1Loss)),
    _loss(nn.HuberLoss, _unit),
    _loss(nn.NLLLoss, _classes),
    *(_loss(kind, _unit) for kind in (nn.KLDivLoss, nn.PoissonNLLLoss)),
    _loss(nn.GaussianNLLLoss, _unit, _unit),
    _loss(nn.SoftMarginLoss, _sign),
    _loss(nn.MultiLabelSoftMarginLoss, lambda n: 1.0 * (_unit(n) > 0.5)),
    _loss(nn.HingeEmbeddingLoss, _sign),
    LossCase(
        _known("CausalLMLoss"),
        lambda n: (torch.randn(n, 3, 2), torch.randint(0, 2, (n, 3))),
        name="CausalLMLoss",
    ),
    LossCase(
        partial(_known("AutodiffLoss"), _squares),
        lambda n: (_unit(n), _unit(n)),
        sampled=False,
        name="AutodiffLoss",
    ),
    LossCase(_known("SumOutputs"), lambda n: (_unit(n),), sampled=False, name="SumOutputs"),
]
