"""No two results share memory: what is overwritten changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import (
    EKFAC,
    KFAC,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from backpack_products import FirstOrderExtension, SampleProduct
from tests.cases import Net, Problem, classification, mlp

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a result: a tensor, a list of factors, or an eigenbasis."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _tensors(item, f"{name}[{position}]")
    elif hasattr(value, "__dict__"):
        for key, item in vars(value).items():
            yield from _tensors(item, f"{name}.{key}")


def everything(model: nn.Module, fields: list[str]) -> dict[str, Tensor]:
    """Parameters, gradients and results, by name."""
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        for field in ("data", "grad", *fields):
            found.update(_tensors(getattr(p, field), f"{name}.{field}"))
    return found


def check_memory(problem: Problem, *extensions: Any) -> None:
    """Overwrite one result after the other, and look at the rest."""
    problem.run(*extensions)
    results = everything(problem.model, [extension.savefield for extension in extensions])
    copies = {name: tensor.clone() for name, tensor in results.items()}
    for name, tensor in results.items():
        tensor.fill_(torch.nan)
        changed = [n for n, t in results.items() if n != name and not torch.equal(t, copies[n])]
        assert not changed, f"{name} shares memory with {changed}"
        tensor.copy_(copies[name])


Make = Callable[[], tuple[nn.Module, tuple[int, ...]]]


def _branches() -> Net:
    """Two layers with the same gradient at their outputs."""
    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(3, 4), "c": nn.Linear(4, 3)}
    return Net(lambda net, x: net.c(net.a(x) + net.b(x)), **parts)


def _normed_branches() -> Net:
    """Two offsets with the same columns at their outputs."""
    parts = {"a": nn.LayerNorm(4), "b": nn.LayerNorm(4), "c": nn.Linear(4, 3)}
    return Net(lambda net, x: net.c(net.a(net.d(x)) + net.b(x.tanh())), **parts, d=nn.Linear(4, 4))


def _tied() -> Net:
    net = Net(lambda net, x: net.b(net.a(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    net.b.weight = net.a.weight
    return net


def _own() -> nn.Sequential:
    shifts = [Net(lambda net, x: x + net.shift, shift=nn.Parameter(torch.randn(4))) for _ in "ab"]
    return nn.Sequential(nn.Linear(3, 4), *shifts, nn.Linear(4, 3))


def _embedding() -> Net:
    parts = {"a": nn.Embedding(3, 3), "b": nn.Embedding(3, 3), "c": nn.Linear(3, 3)}
    return Net(lambda net, x: net.c(net.a(x.argmax(1)) + net.b(x.argmax(1))), **parts)


def _recurrent() -> Net:
    parts = {"a": nn.LSTM(2, 3, batch_first=True), "c": nn.Linear(6, 3)}
    return Net(lambda net, x: net.c(net.a(x)[0].flatten(1)), **parts)


def _token() -> Net:
    """What is sent to the token is a part of what the loss sends."""
    token = nn.Parameter(torch.randn(1, 1, 3))
    return Net(
        lambda net, x: torch.cat([net.token.expand(len(x), -1, -1), net.a(x)], 1).sum(1),
        token=token,
        a=nn.Linear(3, 3),
    )


NETS: dict[str, Make] = {
    "token": lambda: (_token(), (2, 3)),
    "mlp": lambda: (mlp(), (3,)),
    "biases": lambda: (nn.Sequential(*mlp(), nn.Identity()), (3,)),
    "branches": lambda: (_branches(), (3,)),
    "normed branches": lambda: (_normed_branches(), (4,)),
    "tied": lambda: (_tied(), (3,)),
    "own": lambda: (_own(), (3,)),
    "normalised": lambda: (
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.Linear(4, 3)),
        (3,),
    ),
    "convolution": lambda: (
        nn.Sequential(nn.Conv1d(2, 2, 2), nn.Flatten(), nn.Linear(4, 3)),
        (2, 3),
    ),
    "embedding": lambda: (_embedding(), (3,)),
    "recurrent": lambda: (_recurrent(), (2, 2)),
}


# Each is run twice, with two savefields.
TWICE: dict[str, Callable[[str], Any]] = {
    "BatchGrad": lambda name: BatchGrad(savefield=name),
    "BatchL2Grad": lambda name: BatchL2Grad(savefield=name),
    "BatchDotGrad": lambda name: BatchDotGrad(savefield=name),
    "SumGradSquared": lambda name: SumGradSquared(savefield=name),
    "Variance": lambda name: Variance(savefield=name),
    "ClippedSumGrad": lambda name: ClippedSumGrad(1e6, savefield=name),
    "SqrtGGNExact": lambda name: SqrtGGNExact(savefield=name),
    "SqrtGGNExact_columns": lambda name: SqrtGGNExact(savefield=name, chunk_size=1),
    "SqrtGGNMC": lambda name: SqrtGGNMC(savefield=name),
    "DiagGGNExact": lambda name: DiagGGNExact(savefield=name),
    "BatchDiagGGNExact": lambda name: BatchDiagGGNExact(savefield=name),
}


ON_CHAINS: dict[str, Callable[[str], Any]] = {
    "DiagHessian": lambda name: DiagHessian(savefield=name),
    "BatchDiagHessian": lambda name: BatchDiagHessian(savefield=name),
    "KFAC": lambda name: KFAC(savefield=name),
    "KFLR": lambda name: KFLR(savefield=name),
    "KFLR_expand": lambda name: KFLR("expand", savefield=name),
    "KFRA": lambda name: KFRA(savefield=name),
    "EKFAC": lambda name: EKFAC(savefield=name),
}


@pytest.mark.grid(4)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("extension", TWICE)
def test_two_savefields(extension: str, net: str, batch: int) -> None:
    model, shape = NETS[net]()
    make = TWICE[extension]
    check_memory(classification(model, shape, batch), make("one"), make("other"))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("extension", ON_CHAINS)
def test_two_savefields_of_a_chain(extension: str, batch: int) -> None:
    make = ON_CHAINS[extension]
    check_memory(classification(mlp(), (3,), batch), make("one"), make("other"))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("net", NETS)
def test_many_extensions(net: str, batch: int) -> None:
    model, shape = NETS[net]()
    extensions = [make(name) for name, make in TWICE.items()]
    check_memory(classification(model, shape, batch), *extensions)


@pytest.mark.parametrize("batch", [1, 3])
def test_all_kinds_of_factors(batch: int) -> None:
    extensions = [make(name) for name, make in ON_CHAINS.items()]
    check_memory(classification(mlp(), (3,), batch), *extensions)


def test_some_samples_and_all() -> None:
    extensions = [BatchGrad(), BatchGrad([0, 1, 2], "three"), BatchGrad([1], "one")]
    check_memory(classification(mlp(), (3,)), *extensions)


def test_gradients_beside_columns_in_chunks() -> None:
    """A chunk visits the call before its gradient is known, which a result may be a view of."""

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.token.expand(len(x), -1, -1), x], 1)

    data = torch.randn(1, 1, 2), torch.randn(1, 2, 2)
    problem = Problem(nn.Sequential(Token()), data[:1], nn.MSELoss(reduction="sum"), data[1])
    check_memory(problem, BatchGrad(), DiagGGNExact(chunk_size=2))


def test_what_autograd_returns_is_no_part_of_a_result() -> None:
    """Of one sample, the gradient of a token is a view of what was sent to it."""
    token = nn.Parameter(torch.randn(1, 1, 1))
    net: Any = extend(
        Net(lambda net, x: torch.cat([net.token.expand(len(x), -1, -1), x], 1), token=token)
    )
    with backpack(BatchGrad()):
        (gradient,) = torch.autograd.grad(net(torch.randn(1, 1, 1)).square().sum(), [net.token])
    expected = net.token.grad_batch.clone()
    gradient.fill_(torch.nan)
    assert torch.equal(net.token.grad_batch, expected)


@pytest.mark.parametrize("kind", [dict, list])
def test_one_object_that_is_returned_for_all_parameters(kind: type) -> None:
    class Same(FirstOrderExtension):
        savefield = "same"
        value = [torch.ones(3)] if kind is list else {0: torch.ones(3)}

        def read(self, product: SampleProduct) -> Any:
            return self.value

    problem = classification(mlp(), (3,))
    problem.run(Same())
    first, *others = [parameter.same for parameter in problem.model.parameters()]
    first[0].fill_(torch.nan)
    first[0] = None
    assert all(torch.equal(value[0], torch.ones(3)) for value in (*others, Same.value))
