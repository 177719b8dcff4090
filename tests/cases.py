"""Layers and losses as data, and one problem type: a model, data, a loss, and what to expect."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from backpack_core import backpack, extend
from backpack_core.contract.extension import Extension
from backpack_core.extensions import BatchGrad, DiagGGNExact, SumGradSquared
from backpack_layers.modules import Slicing
from tests import oracle


class Net(Module):
    """Modules and parameters by name, and a function of the net and its inputs as forward pass."""

    def __init__(self, function: Callable[..., Any], **parts: Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def mlp() -> nn.Sequential:
    """The smallest net with something to pass through."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


@dataclass
class Problem:
    """A model and a loss on given data.

    Attributes:
        model: Maps the inputs to an output ``[N, *out]``.
        inputs: Its input tensors ``[N, *]``.
        lossfunc: A module of output and target.
        target: The target.
        whole: See :func:`tests.oracle.rows`.
        rtol: Relative error that is allowed.
    """

    model: Module
    inputs: tuple[Tensor, ...]
    lossfunc: Module
    target: Tensor
    whole: bool = False
    rtol: float = 1e-10

    def loss(self) -> Tensor:
        """A forward pass of the extended model and loss."""
        extend(self.model), extend(self.lossfunc)
        result: Tensor = self.lossfunc(self.model(*self.inputs), self.target)
        return result

    def run(self, *extensions: Extension, **options: Any) -> Tensor:
        """A forward and a backward pass with extensions; the loss."""
        self.model.zero_grad()
        loss = self.loss()
        with backpack(*extensions, **options):
            loss.backward()
        return loss

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, each once."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def fields(self, name: str) -> list[Any]:
        """What an extension stored, for every trained parameter."""
        return [getattr(p, name) for p in self.parameters]

    def expected(self, quantity: Callable[..., Tensor]) -> list[Tensor]:
        """An oracle, applied to an untouched copy of model and loss."""
        from backpack_core import unextend

        model, lossfunc = (unextend(copy.deepcopy(m)) for m in (self.model, self.lossfunc))
        state = torch.random.get_rng_state()

        def forward(*inputs: Tensor) -> Tensor:
            torch.random.set_rng_state(state)
            output: Tensor = model(*inputs)
            return output

        found = [
            quantity(forward, lambda out: lossfunc(out, self.target), self.inputs, p, self.whole)
            for p in model.parameters()
            if p.requires_grad
        ]
        torch.random.set_rng_state(state)
        return found

    def compare(self, name: str, expected: list[Tensor]) -> None:
        """Compare one field of all trained parameters."""
        for ours, reference in zip(self.fields(name), expected, strict=True):
            oracle.assert_close(ours, reference, self.rtol)

    def check(self, first: bool = True, second: bool = True, **options: Any) -> None:
        """Run the exact extensions in one backward pass and compare all with the oracle."""
        extensions: list[Extension] = []
        gradients = diagonals = []
        if first:
            extensions += [BatchGrad(), SumGradSquared()]
            gradients = self.expected(oracle.individual_gradients)
        if second:
            extensions.append(DiagGGNExact())
            diagonals = [d.sum(0) for d in self.expected(oracle.ggn_diagonals)]
        self.run(*extensions, **options)
        if first:
            self.compare("grad_batch", gradients)
            self.compare("sum_grad_squared", [g.square().sum(0) for g in gradients])
            self.compare("grad", [g.sum(0) for g in gradients])
        if second:
            self.compare("diag_ggn_exact", diagonals)


def classification(
    model: Module, shape: tuple[int, ...], batch: int = 3, classes: int = 3, **options: Any
) -> Problem:
    """Random data ``[batch, *shape]`` and classes, with the cross-entropy loss."""
    inputs = (torch.randn(batch, *shape),)
    target = torch.randint(0, classes, (batch,))
    return Problem(model, inputs, nn.CrossEntropyLoss(**options), target)


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


@dataclass
class LossCase:
    """A loss on the output of a small net.

    Attributes:
        make: Makes the loss; takes ``reduction``.
        shape: Shape of the output, without the batch axis.
        target: Makes the target for an output.
        id: Name of the case.
    """

    make: Callable[..., Module]
    shape: tuple[int, ...]
    target: Callable[[Tensor], Tensor]
    id: str

    def problem(self, batch: int, reduction: str) -> Problem:
        """``Linear``, ``Tanh``, ``Linear``, ``Unflatten``, and the loss."""
        size = torch.Size(self.shape).numel()
        model = nn.Sequential(
            nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, size), nn.Unflatten(1, self.shape)
        )
        x = torch.randn(batch, 2)
        target = self.target(torch.zeros(batch, *self.shape))
        return Problem(model, (x,), self.make(reduction=reduction), target)


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


def _classes(*shape: int, ignored: bool = False) -> Callable[[Tensor], Tensor]:
    def target(output: Tensor) -> Tensor:
        result = torch.randint(0, output.shape[1], (len(output), *shape))
        if ignored:
            result.view(-1)[-1] = 1
            result.view(-1)[0] = 0
        return result

    return target


def _probabilities(output: Tensor) -> Tensor:
    return torch.rand_like(output).softmax(1)


def _cross_entropy(**options: Any) -> Callable[..., Module]:
    return lambda reduction: nn.CrossEntropyLoss(reduction=reduction, **options)


def _weight() -> dict[str, Any]:
    return {"weight": torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)}


LOSSES: list[LossCase] = [
    LossCase(nn.MSELoss, (3,), torch.randn_like, "mse"),
    LossCase(nn.MSELoss, (2, 2), torch.randn_like, "mse-2x2"),
    LossCase(_cross_entropy(), (3,), _classes(), "ce"),
    LossCase(_cross_entropy(), (3,), _probabilities, "ce-probabilities"),
    LossCase(_cross_entropy(**_weight()), (3,), _classes(), "ce-weight"),
    LossCase(_cross_entropy(**_weight()), (3,), _probabilities, "ce-weight-probabilities"),
    LossCase(_cross_entropy(ignore_index=0), (3, 2), _classes(2, ignored=True), "ce-ignore"),
    LossCase(
        _cross_entropy(ignore_index=0, **_weight()),
        (3, 2),
        _classes(2, ignored=True),
        "ce-ignore-weight",
    ),
    LossCase(_cross_entropy(label_smoothing=0.2), (3,), _classes(), "ce-smoothing"),
    LossCase(
        _cross_entropy(label_smoothing=0.2, **_weight()), (3,), _classes(), "ce-smoothing-weight"
    ),
    LossCase(_cross_entropy(), (3, 2), _classes(2), "ce-2"),
    LossCase(_cross_entropy(), (2, 2, 2), _probabilities, "ce-2x2-probabilities"),
    LossCase(nn.BCEWithLogitsLoss, (3,), lambda out: torch.rand_like(out), "bce"),
    LossCase(
        lambda reduction: nn.BCEWithLogitsLoss(
            reduction=reduction,
            weight=torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64),
            pos_weight=torch.tensor([1.5, 1.0, 3.0], dtype=torch.float64),
        ),
        (3,),
        lambda out: torch.randint(0, 2, out.shape).to(out.dtype),
        "bce-weight",
    ),
]

REDUCTIONS = ("mean", "sum")
BATCHES = (1, 5)
SETTINGS = list(itertools.product(REDUCTIONS, BATCHES))
