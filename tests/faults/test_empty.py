"""Batches without a sample, as Poisson sampling draws them, and axes of length zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import (
    EKFAC,
    GGNMP,
    HMP,
    JMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    DiagHMP,
    GGNGram,
    ProjectedGrad,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from backpack_layers.modules import ReduceTuple
from backpack_products.tuning import memory_budget, set_memory_budget
from tests.cases import Net, classification

Shape = Callable[[torch.Size], tuple[int, ...]]

# The shape of a result, for a parameter of a shape, of a batch of none.
TENSORS: dict[Callable[[], Any], Shape] = {
    BatchGrad: lambda s: (0, *s),
    BatchL2Grad: lambda s: (0,),
    BatchDotGrad: lambda s: (0, 0),
    SumGradSquared: tuple,
    Variance: tuple,
    lambda: ClippedSumGrad(1.0, normaliser=None): tuple,
    lambda: ClippedSumGrad(1.0, clipping="per_layer", normaliser=None): tuple,
    DiagGGNExact: tuple,
    DiagGGNMC: tuple,
    BatchDiagGGNExact: lambda s: (0, *s),
    BatchDiagGGNMC: lambda s: (0, *s),
    SqrtGGNExact: lambda s: (2, 0, *s),
    SqrtGGNMC: lambda s: (1, 0, *s),
    DiagHessian: tuple,
    BatchDiagHessian: lambda s: (0, *s),
}
PRODUCTS = [GGNMP, HMP, PCHMP]
FACTORS: list[Any] = [KFAC, KFLR, KFRA, lambda: KFLR(weight_sharing="expand"),
                      lambda: KFLR(weight_sharing="reduce")]  # fmt: skip
# What a Hessian, or a chain of averages, is not known for.
NO_HESSIAN = {"recurrent", "attention", "no_rule", "embedding_bag", "tied", "table"}


class Shift(nn.Module):
    """Has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x + self.shift)


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    net[2].weight = net[0].weight
    return net


def _attention(net: Net, x: Tensor) -> Tensor:
    return net.last(net.attention(x, x, x, need_weights=False)[0].flatten(1))


def _bridged(net: Net, x: Tensor) -> Tensor:
    hidden = F.relu(net.first(x)).transpose(1, 2)
    return net.last((hidden * 2 + hidden[:, :1]).sum(2) - 1)


def _table(net: Net, x: Tensor) -> Tensor:
    """A table that has no samples, and a layer that has them on axis 1."""
    hidden = net.first(x) + net.table(torch.arange(5))
    return net.last(torch.tanh(net.second(hidden.transpose(0, 1))).transpose(0, 1).sum(1))


Made = tuple[Callable[[], nn.Module], tuple[int, ...]]
MODELS: dict[str, Made] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3)), (3,)),
    "tokens": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(20, 3)),
        (5, 3),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 2, groups=2), nn.GELU(), nn.Flatten(), nn.Linear(4, 3),
        ),
        (2, 4, 4),
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose1d(2, 4, 2, stride=2), nn.GroupNorm(2, 4), nn.AvgPool1d(2),
            nn.PReLU(4), nn.Flatten(), nn.Linear(12, 3),
        ),
        (2, 3),
    ),
    "reshaped": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 4, 1), nn.ChannelShuffle(2),
            nn.Conv2d(4, 1, 1), nn.ReflectionPad2d(1), nn.LPPool2d(2, 2),
            nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 3),
        ),
        (16,),
    ),
    "normalised": (
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Softmax(1), nn.RMSNorm(4), nn.Dropout(),
            nn.Linear(4, 3),
        ).eval(),
        (4,),
    ),
    "recurrent": (
        lambda: nn.Sequential(
            nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True), ReduceTuple(), nn.Flatten(),
            nn.Linear(12, 3),
        ),
        (3, 3),
    ),
    "attention": (
        lambda: Net(
            _attention, attention=nn.MultiheadAttention(4, 2, batch_first=True),
            last=nn.Linear(12, 3),
        ),
        (3, 4),
    ),
    "bridged": (lambda: Net(_bridged, first=nn.Linear(3, 4), last=nn.Linear(4, 3)), (5, 3)),
    "table": (
        lambda: Net(
            _table, first=nn.Linear(3, 4), table=nn.Embedding(5, 4), second=nn.Linear(4, 4),
            last=nn.Linear(4, 3),
        ),
        (5, 3),
    ),
    "no_rule": (lambda: nn.Sequential(nn.Linear(3, 4), Shift(), nn.Linear(4, 3)), (3,)),
    "tied": (_tied, (4,)),
}  # fmt: skip


def _run(name: str, reduction: str, *extensions: Any) -> nn.Module:
    make, shape = MODELS[name]
    model = extend(make())
    lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
    loss = lossfunc(model(torch.randn(0, *shape)), torch.zeros(0, dtype=torch.long))
    with backpack(*extensions):
        loss.sum().backward()
    return model


def _skip(name: str, extension: Any) -> None:
    kind = type(extension)
    curved = (DiagHessian, BatchDiagHessian, HMP, PCHMP)
    if isinstance(extension, curved) and name in (*NO_HESSIAN, "transposed"):
        pytest.skip("an operation between the modules has a second derivative, or none is known")
    if kind is KFRA and name in (*NO_HESSIAN, "bridged", "transposed"):
        pytest.skip("KFRA takes chains of layers that have Kronecker factors")
    if kind in (KFAC, KFLR, EKFAC) and name in ("no_rule", "tied"):
        pytest.skip("the parameters of this net have no Kronecker factors")


pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


@pytest.mark.grid(4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("make", TENSORS, ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize("name", MODELS)
def test_no_sample(name: str, make: Any, reduction: str) -> None:
    extension = make()
    _skip(name, extension)
    model = _run(name, reduction, extension)
    for p in model.parameters():
        value = getattr(p, extension.savefield)
        assert tuple(value.shape) == TENSORS[make](p.shape)
        assert not value.any()


@pytest.mark.parametrize("make", PRODUCTS)
@pytest.mark.parametrize("name", MODELS)
def test_products_of_no_sample(name: str, make: Any) -> None:
    extension = make()
    _skip(name, extension)
    for p in _run(name, "mean", extension).parameters():
        product = getattr(p, extension.savefield)(torch.randn(2, *p.shape))
        assert product.shape == (2, *p.shape)
        assert not product.any()


def test_products_of_no_look_up() -> None:
    net = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    extend(net), extend(lossfunc := nn.CrossEntropyLoss())
    none = torch.zeros(0, dtype=torch.long)
    with backpack(GGNMP(), HMP(), PCHMP(), DiagHMP(), JMP()):
        lossfunc(net(none.reshape(0, 2)), none).backward()
    for p in net.parameters():
        for product in (p.ggnmp, p.hmp, p.pchmp):
            assert not product(torch.randn(2, *p.shape)).any()
        assert not p.diag_hmp.any()
        assert p.jmp(torch.randn_like(p)).shape == (0, 3)


@pytest.mark.parametrize("make", FACTORS, ids=["KFAC", "KFLR", "KFRA", "expand", "reduce"])
@pytest.mark.parametrize("name", MODELS)
def test_factors_of_no_sample(name: str, make: Any) -> None:
    extension = make()
    _skip(name, extension)
    for p in _run(name, "mean", extension).parameters():
        factors = getattr(p, extension.savefield)
        assert factors.dense().shape == (p.numel(), p.numel())
        assert not factors.dense().any()
        vectors = torch.randn(2, *p.shape)
        assert torch.allclose(factors.solve(vectors, 0.5), 2 * vectors)


@pytest.mark.parametrize("name", MODELS)
def test_eigenvalues_of_no_sample(name: str) -> None:
    extensions = [EKFAC(), GGNGram()]
    if name in ("no_rule", "tied"):
        extensions = extensions[1:]
    for p in _run(name, "mean", *extensions).parameters():
        if len(extensions) == 2:
            assert not p.ekfac.values.any()  # type: ignore[attr-defined]
            assert p.ekfac.values.numel() == p.numel()  # type: ignore[attr-defined]
        assert p.ggn_gram.gram.shape == (2, 0, 2, 0)  # type: ignore[attr-defined]
        assert p.ggn_gram.spectrum.eigenvalues.shape == (0,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [nn.MSELoss, nn.BCEWithLogitsLoss, nn.HuberLoss, nn.L1Loss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.filterwarnings("ignore::backpack_core.errors.BackpackWarning")
def test_losses_of_no_sample(make: Any, reduction: str) -> None:
    model, lossfunc = extend(nn.Linear(3, 2)), extend(make(reduction=reduction))
    loss = lossfunc(model(torch.randn(0, 3)), torch.rand(0, 2))
    with backpack(BatchGrad(), DiagGGNExact(), KFLR(), KFRA(), DiagHessian()):
        loss.sum().backward()
    assert model.weight.grad_batch.shape == (0, 2, 3)
    assert not model.weight.diag_ggn_exact.any()
    assert not model.weight.diag_h.any()


def test_no_sample_with_a_small_budget() -> None:
    before = memory_budget()
    set_memory_budget(1)
    try:
        _run("convolutions", "mean", BatchGrad(), SumGradSquared(), DiagGGNExact(), Variance())
    finally:
        set_memory_budget(before)


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_after_an_empty_one(name: str) -> None:
    """Nothing of it stays behind."""
    make, shape = MODELS[name]
    problem = classification(make(), shape)
    problem.model.eval()
    extend(problem.model)
    with backpack(BatchGrad(), DiagGGNExact()):
        loss = extend(nn.CrossEntropyLoss())(
            problem.model(torch.randn(0, *shape)), torch.zeros(0, dtype=torch.long)
        )
        loss.backward()
    problem.check()


# Axes of length zero


def _no_tokens(net: Net, x: Tensor) -> Tensor:
    """A linear layer that sees no position, beside one that does."""
    return net.last(x) + net.first(x[:, None][:, :0]).sum(1)


def _no_features(net: Net, x: Tensor) -> Tensor:
    """Through a layer that is as wide as nothing."""
    return net.last(x) + net.second(net.tanh(net.first(x)))


AXES: dict[str, Callable[[], nn.Module]] = {
    "tokens": lambda: Net(_no_tokens, first=nn.Linear(4, 3), last=nn.Linear(4, 3)),
    "convolution": lambda: Net(
        lambda net, x: net.last(x) + net.first(x[:, None][..., :0]).sum((1, 2))[:, None],
        first=nn.ConvTranspose1d(1, 1, 1), last=nn.Linear(4, 3),
    ),
    "features": lambda: Net(
        _no_features, first=nn.Linear(4, 0), tanh=nn.Tanh(), second=nn.Linear(0, 3),
        last=nn.Linear(4, 3),
    ),
    "embedding": lambda: Net(
        lambda net, x: net.last(x) + net.table(x[:, :0].long()).sum(1),
        table=nn.Embedding(2, 3), last=nn.Linear(4, 3),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("name", ["tokens", "features", "embedding"])
def test_an_axis_of_length_zero(name: str) -> None:
    problem = classification(AXES[name](), (4,))
    problem.check()
    problem.run(Variance(), BatchL2Grad(), BatchDotGrad(), ClippedSumGrad(1.0), BatchDiagGGNExact())
    for p in problem.parameters:
        assert p.variance.shape == p.grad_clipped.shape == p.shape  # type: ignore[attr-defined]
        assert p.batch_l2.shape == (3,)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("name", ["tokens", "features"])
@pytest.mark.parametrize("extension", [KFLR, EKFAC, GGNGram, DiagHessian, GGNMP, HMP])
def test_curvature_with_an_axis_of_length_zero(name: str, extension: Any) -> None:
    problem = classification(AXES[name](), (4,))
    problem.run(extension())
    for p in problem.parameters:
        value = getattr(p, extension.savefield)
        if callable(value):
            assert value(torch.randn(2, *p.shape)).shape == (2, *p.shape)
        elif extension in (KFLR, EKFAC):
            assert value.dense().shape == (p.numel(), p.numel())


def test_an_output_without_features() -> None:
    """No column is left to carry."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    extend(model), (lossfunc := extend(nn.MSELoss(reduction="sum")))
    output = model(torch.randn(2, 3))[:, :0]
    with backpack(BatchGrad(), DiagGGNExact(), KFLR(), GGNGram()):
        lossfunc(output, torch.zeros(2, 0)).backward()
    for p in model.parameters():
        assert p.grad_batch.shape == (2, *p.shape)
        assert not p.diag_ggn_exact.any()


class _Nothing(nn.Module):
    """A layer, times a single number, plus a parameter without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3), nn.Parameter(torch.rand(()))
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor + self.none.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("extension", [KFAC, KFLR, EKFAC])
def test_factors_of_a_parameter_without_entries(extension: Any) -> None:
    problem = classification(_Nothing(), (4,))
    problem.run(extension())
    none = problem.model.none
    assert getattr(none, extension.savefield).dense().shape == (0, 0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("sizes", [(4, 0, 3), (0, 4, 3)])
def test_projections_of_a_weight_without_entries(sizes: tuple[int, int, int]) -> None:
    first, middle, last = sizes
    net = nn.Sequential(nn.Linear(first, middle), nn.Tanh(), nn.Linear(middle, last))
    problem = classification(net, (first,))
    problem.run(ProjectedGrad(4))
    for p in problem.parameters:
        assert p.projected_grad.shape == (3, 4)  # type: ignore[attr-defined]
        assert p.numel() or not p.projected_grad.any()  # type: ignore[attr-defined]


def test_averages_of_no_look_up() -> None:
    """The sum over positions is an operation between modules."""
    net = Net(
        lambda net, x: net.last(net.first(x).sum(1)), first=nn.Linear(2, 4), last=nn.Linear(4, 3)
    )
    extend(net), extend(lossfunc := nn.CrossEntropyLoss())
    with backpack(KFRA()):
        lossfunc(net(torch.randn(0, 3, 2)), torch.zeros(0, dtype=torch.long)).backward()
    assert not net.first.weight.kfra.dense().any()
