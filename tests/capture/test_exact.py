"""A captured step gives what the engine gives, bit by bit, and draws the same random numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import capture
from backpack_core import Extension, View, backpack, extend
from backpack_core import extensions as known
from backpack_core.errors import BackpackError
from tests.capture.nets import NETS
from tests.capture.twins import Function, Twins, same
from tests.cases import Net

pytestmark = [
    pytest.mark.usefixtures("reproducible"),
    pytest.mark.filterwarnings("ignore:.*deterministic implementation"),
]

CODE = ("GGNMP", "HMP", "DiagHMP", "PCHMP", "GGNGram", "JMP")  # results that are code
OWN = ("GradInner",)  # the sum over parameters is an attribute of its own, so the engine runs it
NAMES = [
    *("BatchGrad", "BatchL2Grad", "BatchDotGrad", "SumGradSquared", "Variance", "ClippedSumGrad"),
    *("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC", "SqrtGGNExact"),
    *("SqrtGGNMC", "DiagHessian", "BatchDiagHessian", "KFAC", "KFLR", "KFRA", "EKFAC"),
    *("Jacobians", "NTK", "TaskGrad", "TaskDotGrad", "AggregatedGrad", "ProjectedGrad"),
]


def made(name: str) -> Extension:
    arguments: dict[str, tuple[object, ...]] = {
        "ClippedSumGrad": (0.1,),
        "AggregatedGrad": (torch.diag,),
        "ProjectedGrad": (3,),
    }
    return getattr(known, name)(*arguments.get(name, ()))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the engine warns of, it warns of without a capture, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):  # for LSTMs
            yield


def test_every_extension_is_here() -> None:
    ours = ("backpack_firstorder", "backpack_secondorder")
    listed = {n for n in dir(known) if getattr(known, n).__module__.startswith(ours)}
    assert listed == {*NAMES, *CODE, *OWN}


@pytest.mark.grid(8)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", NAMES)
def test_quantities(net: str, name: str) -> None:
    make, draw = NETS[net]
    twins = Twins(make(), [made(name)])
    batches = [draw(4) for _ in range(7)]
    try:
        twins.engine(*batches[0])
    except BackpackError as error:
        for batch in batches:
            with pytest.raises(type(error)):
                twins.step(*batch)
        return
    twins.train(batches)
    assert twins.replays == 4, twins.step.report()


@pytest.mark.parametrize("name", ["DiagGGNExact", "DiagHessian", "KFAC", "Jacobians"])
@pytest.mark.parametrize(
    ("layer", "dims"),
    [
        (nn.AvgPool1d(2), 1),
        (nn.AvgPool2d(2, padding=1), 2),
        (nn.AvgPool3d(2), 3),
        (nn.AdaptiveAvgPool1d(2), 1),
        (nn.AdaptiveAvgPool2d(2), 2),
        (nn.AdaptiveAvgPool3d(2), 3),
    ],
)
def test_layers_whose_input_counts_only_by_its_shape(
    layer: nn.Module, dims: int, name: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Flatten(), nn.LazyLinear(3))
    shape = (3, 2, *[4] * dims)
    model(torch.rand(shape))
    twins = Twins(model, [made(name)])
    twins.train([(torch.rand(shape), torch.randint(3, (3,))) for _ in range(7)])
    assert twins.replays == 4, twins.step.report()


@pytest.mark.parametrize("name", ["BatchGrad", "DiagGGNExact"])
def test_images_with_channels_last(name: str) -> None:
    """Torch then changes the strides of what it has averaged."""
    pool = nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), pool, nn.Flatten(), nn.Linear(3, 3))
    model = model.to(memory_format=torch.channels_last)
    twins = Twins(model, [made(name)])
    images = [torch.rand(4, 2, 6, 6).to(memory_format=torch.channels_last) for _ in range(7)]
    twins.train([(x, torch.randint(3, (4,))) for x in images])
    assert twins.replays == 4, twins.step.report()


def of_rows(model: nn.Module, lossfunc: nn.Module) -> Function:
    """A loss with several rows of each sample, as that of a language model."""
    return lambda x, y: lossfunc(model(x).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("name", ["DiagGGNExact", "DiagHessian", "KFLR", "Jacobians"])
def test_losses_with_several_rows_of_each_sample(name: str) -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    twins = Twins(model, [made(name)], of_rows)
    twins.train([(torch.randint(6, (4, 5)), torch.randint(3, (4, 5))) for _ in range(7)])
    assert twins.replays == 4, twins.step.report()


def doubled(model: nn.Module) -> nn.Module:
    return nn.utils.parametrize.register_parametrization(model, "weight", Doubled())


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRIZATIONS = {
    "doubled": doubled,
    "weight": nn.utils.parametrizations.weight_norm,
    "spectral": nn.utils.parametrizations.spectral_norm,  # it also writes to buffers
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.parametrize("name", ["BatchGrad", "ClippedSumGrad", "Jacobians"])
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_computed_parameters(kind: str, name: str) -> None:
    model = nn.Sequential(PARAMETRIZATIONS[kind](nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))
    twins = Twins(model, [made(name)])
    twins.train([(torch.rand(4, 5), torch.randint(3, (4,))) for _ in range(7)])
    assert twins.replays == 4, twins.step.report()


@pytest.mark.long
@pytest.mark.parametrize("gradient", ["shared", "none", "skipped"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", NAMES)
def test_quantities_in_all_gradient_modes(net: str, name: str, gradient: str) -> None:
    make, draw = NETS[net]
    # In the eighth, which is measured, autograd computes what other passes leave out.
    batches = [draw(4) for _ in range(7)]
    try:  # on another net: passes of one net count
        Twins(make(), [made(name)], gradient=gradient).engine(*batches[0])
    except BackpackError as error:
        with pytest.raises(type(error)):
            Twins(make(), [made(name)], gradient=gradient).step(*batches[0])
        return
    twins = Twins(make(), [made(name)], gradient=gradient)
    twins.train(batches)
    assert twins.replays >= 2, twins.step.report()


@pytest.mark.grid(6)
@pytest.mark.parametrize("gradient", ["shared", "none", "skipped"])
@pytest.mark.parametrize("net", ["mlp", "residual", "cnn", "gru", "encoder", "tied", "frozen"])
@pytest.mark.parametrize("names", [("BatchGrad",), ("SumGradSquared", "KFAC"), ("DiagGGNExact",)])
def test_gradient_modes(net: str, gradient: str, names: tuple[str, ...]) -> None:
    make, draw = NETS[net]
    twins = Twins(make(), [made(name) for name in names], gradient=gradient)
    # In the eighth, autograd computes what is shared in others, and rounds in another way.
    twins.train([draw(4) for _ in range(7)])
    assert twins.replays >= 2, twins.step.report()


@pytest.mark.parametrize("net", ["mlp", "dropout", "embedding"])
def test_several_shapes_alternate(net: str) -> None:
    make, draw = NETS[net]
    twins = Twins(make(), [made("BatchGrad"), made("KFAC")])
    twins.train([draw(2 + number % 3) for number in range(24)])
    assert twins.replays >= 9, twins.step.report()


def test_gradients_are_accumulated() -> None:
    make, draw = NETS["mlp"]
    twins = Twins(make(), [made("BatchGrad")])
    before = None
    for number in range(9):
        twins.run(*draw(4), keeps=True)
        grad = twins.model[0].weight.grad
        assert before is None or grad is before, number  # the same tensor, as with autograd
        before = grad
    assert twins.replays == 6


class Sums:
    """Adds up what is visited, which is data."""

    def __init__(self) -> None:
        self.sums = list[Tensor]()

    def __call__(self, view: View) -> None:
        self.sums.append(view.stored.outputs[0].detach().sum())

    def found(self) -> dict[str, object]:
        return {"sums": self.sums, "count": len(self.sums)}


def test_what_an_observer_finds() -> None:
    make, draw = NETS["mlp"]
    model, lossfunc = extend(make()), extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, observer=Sums)
    batches = [draw(4) for _ in range(9)]
    for x, y in batches:
        loss, found = step(x, y)
        assert found["count"] == 6
        same(found["sums"][0], loss)
        same(found["sums"][1], model(x).detach().sum())
    assert "7 replays" in step.report()


def test_compiled_models_and_ranges_of_the_profiler() -> None:
    """In steps, compiled code runs as it was written."""

    def write(model: nn.Module, lossfunc: nn.Module) -> Function:
        compiled = torch.compile(model, backend="eager")

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.profiler.record_function("forward"):
                return lossfunc(compiled(x), y)

        return step

    make, draw = NETS["mlp"]
    twins = Twins(make(), [made("BatchGrad")], write)
    twins.train([draw(4) for _ in range(7)])
    assert twins.replays == 4, twins.step.report()


def test_residuals_with_derivatives_of_the_net() -> None:
    """A step may differentiate the net itself, since only its backward pass is in the block."""
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    other, asked = copy.deepcopy(net), (known.Jacobians(), known.BatchGrad())
    lossfunc = extend(nn.MSELoss())

    def laplacian(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        parts = [
            torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in (0, 1)
        ]
        return lossfunc(sum(parts).unsqueeze(1), torch.zeros(len(x), 1))

    step = capture(lambda x: laplacian(net, x), extend(net), lossfunc, *asked)
    extend(other)
    for _ in range(8):
        x = torch.randn(6, 2)
        loss = laplacian(other, x)
        with backpack(*asked):
            loss.backward()
        step(x)
        for p, expected in zip([*net.parameters()][:-1], other.parameters(), strict=False):
            same(p.jacobians, expected.jacobians)
            same(p.grad_batch, expected.grad_batch)
    assert "5 replays" in step.report(), step.report()


def test_many_extensions_at_once() -> None:
    make, draw = NETS["residual"]
    names = ["BatchGrad", "Variance", "BatchL2Grad", "DiagGGNMC", "KFAC", "KFLR", "EKFAC"]
    twins = Twins(make(), [made(name) for name in names])
    twins.train([draw(4) for _ in range(8)])
    assert twins.replays == 5


def gathered(h: Tensor, where: Tensor) -> Tensor:
    return h.gather(1, where[:, :2])


def written(h: Tensor, where: Tensor) -> Tensor:
    """Into other places of the same sample, with time in front."""
    place = torch.zeros_like(h).transpose(0, 1)
    return place.scatter_add(0, where.transpose(0, 1), h.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("name", ["BatchGrad", "DiagGGNExact", "KFAC"])
@pytest.mark.parametrize("move", [gathered, written])
def test_indices_that_the_model_computes(move: Callable[..., Tensor], name: str) -> None:
    """The engine looks whose the entries are, in every pass."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        where = h.sum(2, keepdim=True).argsort(1).expand_as(h)
        return net.b(move(h, where).cumsum(1)).sum(1)

    twins = Twins(Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 3)), [made(name)])
    twins.train([(torch.randn(4, 5, 3), torch.randint(3, (4,))) for _ in range(7)])
    assert twins.replays == 4, twins.step.report()
