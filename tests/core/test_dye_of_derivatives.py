"""What is measured where derivatives of the whole loss are asked for, and around own functions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, UnsupportedError
from backpack_core.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
)
from tests import oracle
from tests.cases import Net

N = 4


class Cube(torch.autograd.Function):
    """A function of the user's, which is called once."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Cube.calls += 1
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def cubes(x: Tensor) -> Tensor:
    found: Tensor = Cube.apply(x)
    return found


def run(net: nn.Module, *extensions: Any, term: Any = None, x: Tensor | None = None) -> nn.Module:
    output = extend(net)(torch.randn(N, 3) if x is None else x)
    loss = extend(nn.MSELoss())(output, torch.zeros_like(output))
    with backpack(*extensions):
        (loss if term is None else loss + term(output)).backward()
    return net


def _two(forward: Any) -> nn.Module:
    return Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3))


def _centred(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(torch.tanh(h - h.mean(0)))  # type: ignore[no-any-return]


def _hooked(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).sin()
    h.register_hook(lambda grad: 2 * grad)
    return net.b(h.cos())  # type: ignore[no-any-return]


@pytest.mark.parametrize("extension", [GGNMP, HMP])
def test_chosen_samples_have_to_be_apart(extension: Any) -> None:
    run(_two(_centred), extension())
    with pytest.raises(SampleMixingError, match="Linear 'a'"):
        run(_two(_centred), extension(subsampling=[0, 2]))


@pytest.mark.parametrize("extension", [GGNMP, HMP])
def test_chosen_samples_behind_a_batch_normalisation(extension: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    run(net, extension())
    with pytest.raises(SampleMixingError, match="train"):
        run(net, extension(subsampling=[1]))


@pytest.mark.parametrize("extension", [GGNMP, HMP, DiagGGNExact])
def test_a_hook_between_modules(extension: Any) -> None:
    with pytest.raises(UnsupportedError, match="a hook changes gradients"):
        run(_two(_hooked), extension())


@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.parametrize("extension", [GGNMP, DiagGGNExact, DiagHessian])
def test_a_term_beside_the_loss_behind_a_function_of_ones_own(extension: Any, check: Any) -> None:
    net = extend(Net(lambda net, x: cubes(net.a(x)), a=nn.Linear(3, 3)))
    output = net(torch.randn(N, 3))
    loss = extend(nn.MSELoss())(output, torch.zeros_like(output)) + output.abs().sum()
    with (
        pytest.raises(UnsupportedError, match="output of Linear 'a' by a term beside them"),
        backpack(extension(), check=check),
    ):
        loss.backward()


class Accumulated(torch.autograd.Function):
    """A cumulative sum over samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(0)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.flip(0).cumsum(0).flip(0)


@pytest.mark.parametrize("extension", [DiagGGNExact, DiagGGNMC, KFLR, lambda: KFAC(mc_samples=2)])
def test_mixing_inside_a_function_of_ones_own(extension: Any) -> None:
    net = Net(
        lambda net, x: net.b(Accumulated.apply(net.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 3)
    )
    with pytest.raises(SampleMixingError):
        run(net, extension())


@pytest.fixture(scope="module")
def operator() -> Any:
    """An operator of the user's: ``x @ x.cumsum(0)`` entry by entry, or ``x²`` if not mixed."""

    @torch.library.custom_op("backpack_tests::steps", mutates_args=())
    def steps(x: Tensor, mixed: bool) -> Tensor:
        return x * (x.cumsum(0) if mixed else x)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.mixed = inputs[1]

    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if not ctx.mixed:
            return 2 * x * grad, None
        return x.cumsum(0) * grad + (grad * x).flip(0).cumsum(0).flip(0), None

    torch.library.register_autograd("backpack_tests::steps", backward, setup_context=setup)
    return steps


@pytest.mark.parametrize("last", [True, False], ids=["before a layer", "at the end"])
def test_an_operator_of_ones_own(operator: Any, last: bool) -> None:
    """Its formula may be called twice, so first order finds samples that mix inside it, too."""
    for mixed in (True, False):
        net = Net(
            lambda net, x, mixed=mixed: (net.b if last else torch.sin)(operator(net.a(x), mixed)),
            a=nn.Linear(3, 3),
            b=nn.Linear(3, 3),
        )
        with pytest.raises(SampleMixingError, match="steps") if mixed else nullcontext():
            run(net, BatchGrad())
    oracle.assert_close(net.a.weight.grad_batch.sum(0), net.a.weight.grad)


@pytest.mark.parametrize("side", ["before", "behind"])
def test_mixing_on_either_side_of_a_function_of_ones_own(side: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        return cubes(h).cumsum(0) if side == "before" else cubes(h.cumsum(0))

    Cube.calls = 0
    with pytest.raises(SampleMixingError):
        run(Net(forward, a=nn.Linear(3, 3)), BatchGrad())
    assert Cube.calls <= 1


@pytest.mark.parametrize("length", [N, 5])
def test_a_function_of_ones_own_on_another_axis(length: int) -> None:
    """As long as the batch or not: no false alarm."""
    net = Net(
        lambda net, x: net.b(cubes(net.a(x).transpose(0, 1)).transpose(0, 1)),
        a=nn.Linear(3, 3),
        b=nn.Linear(3, 3),
    )
    x = torch.randn(N, length, 3)
    run(net, BatchGrad(), x=x)
    for n in range(N):
        output = net(x[n : n + 1])
        loss = output.square().sum() / (N * output.numel())
        expected = torch.autograd.grad(loss, [*net.parameters()])
        for parameter, own in zip(net.parameters(), expected, strict=True):
            oracle.assert_close(parameter.grad_batch[n], own)


class Table(nn.Module):
    """Its parameter is used by the model that it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, GGNMP, DiagHessian])
def test_a_model_of_which_no_module_reports(extension: Any) -> None:
    """Only functions use its parameter: it has a quantity, or there is an error."""
    net = Net(lambda net, x: F.linear(x, net.table.weight), table=Table())
    run(net, extension())
    assert hasattr(net.table.weight, extension().savefield)


def test_samples_that_were_prepared_by_functions_are_no_table() -> None:
    """What a module receives has no graph, and is as long as the batch."""
    net = Net(lambda net, x: net.a(x.softmax(1)).cumsum(0), a=nn.Linear(3, 1))
    with pytest.raises(SampleMixingError):
        run(net, BatchGrad(), x=torch.randn(N, 3))


def test_terms_as_many_as_samples() -> None:
    """No axis of samples is made of a sum of terms."""
    net = extend(nn.Linear(3, 2))
    output = net(torch.randn(3, 3))
    parts = [output.square().sum(), output.sin().sum(), output.exp().sum()]
    with backpack(BatchGrad()):
        torch.stack(parts).sum().backward()
    oracle.assert_close(net.weight.grad_batch.sum(0), net.weight.grad)


def test_an_extension_that_may_leave_parameters_out_says_so() -> None:
    """As ``fail_mode`` has it."""
    net = Net(lambda net, x: net.a(x + net.table.weight[0]), a=nn.Linear(3, 3), table=Table())
    with pytest.raises(UnsupportedError, match="table"):
        run(net, KFRA())
    with pytest.warns(UserWarning, match="gets no quantity"):
        run(net, KFRA(fail_mode="warning"))
    assert not hasattr(net.table.weight, "kfra")
