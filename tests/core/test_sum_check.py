"""In measured passes, sums over samples are compared with what autograd brings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import View, backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchGrad
from backpack_core.testing import temporary_plugin
from backpack_layers.linear import LinearRule
from tests import oracle
from tests.cases import Net, Problem, classification, mlp


@pytest.mark.parametrize("check", ["first", "never"])
def test_what_does_not_add_up(monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    """A layer rule that is wrong by a thousandth."""
    problem = classification(mlp(), (3,))
    original = LinearRule.affine_input
    monkeypatch.setattr(LinearRule, "affine_input", lambda self, view: 1.001 * original(self, view))
    if check == "never":
        problem.run(BatchGrad(), check=check)
        return
    expected = r"parameter \d\.weight of shape .* do not add up"
    with pytest.raises(UnsupportedError, match=expected):
        problem.run(BatchGrad(), check=check)


def test_sums_that_were_wrong_are_compared_in_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether or not that one is among the passes 1, 2, 4, 8, … of the structure."""
    problem = classification(mlp(), (3,))
    problem.run(BatchGrad())
    original = LinearRule.affine_input
    with monkeypatch.context() as patch:
        patch.setattr(LinearRule, "affine_input", lambda self, view: 1.001 * original(self, view))
        for _ in range(6):
            with pytest.raises(UnsupportedError, match="do not add up"):
                problem.run(BatchGrad())
    problem.run(BatchGrad())


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class OwnRule(LinearRule):
    module_types = (Own,)


class Half(OwnRule):
    def affine_output(self, view: View, mat: Tensor) -> Tensor:
        return super().affine_output(view, mat) / 2


def test_sums_are_compared_anew_with_another_rule() -> None:
    problem = classification(nn.Sequential(Own(3, 3)), (3,))
    with temporary_plugin(OwnRule):
        for _ in range(5):  # the next would not be measured
            problem.run(BatchGrad())
    with temporary_plugin(Half), pytest.raises(UnsupportedError, match="do not add up"):
        problem.run(BatchGrad())


@pytest.mark.host("kernels of a GPU add up in single precision")
@pytest.mark.parametrize("check", ["first", "never"])
def test_terms_that_torch_loses_in_half_precision(check: Any) -> None:
    """Torch's gradient of a normalisation of many rows is the wrong one, and the error says so."""
    model = extend(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).bfloat16())
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    torch.manual_seed(0)
    x = torch.rand(2048, 4, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    gain = exact[1].weight
    (expected,) = torch.autograd.grad(exact(x.double()).square().sum(), gain)

    def run() -> None:
        output = model(x)
        with backpack(BatchGrad(), check=check):
            lossfunc(output, torch.zeros_like(output)).backward()

    if check == "first":
        with pytest.raises(UnsupportedError, match="torch loses terms of its own gradient"):
            run()
        return
    run()
    oracle.assert_close(model[1].weight.grad_batch.double().sum(0), expected, 0.05)


def _triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def _assert_individual(problem: Problem, **options: Any) -> None:
    expected = problem.expected(oracle.individual_gradients)
    problem.run(BatchGrad(), check="always", **options)
    problem.compare("grad_batch", expected)


def test_what_changes_a_gradient_in_place_once_it_is_stored() -> None:
    """Autograd may store the very tensor that it brings; data parallel averages it in place."""
    problem = classification(mlp(), (3,))
    for parameter in problem.parameters:
        parameter.register_post_accumulate_grad_hook(_triple)
    for _ in range(2):
        _assert_individual(problem)


def test_hooks_on_parameters_change_what_is_stored() -> None:
    problem = classification(mlp(), (3,))
    for parameter in problem.parameters:
        parameter.register_hook(lambda grad: 3 * grad)
    _assert_individual(problem)


@pytest.mark.parametrize("gradient", ["autograd", "shared", "none"])
def test_parameters_of_functions_have_autograds_gradient(gradient: Any) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        result: Tensor = net.c(torch.tanh(F.linear(net.a(x), net.weight)))
        return result

    model = extend(Net(forward, a=nn.Linear(3, 4), c=nn.Linear(4, 3)))
    model.weight = nn.Parameter(torch.randn(4, 4))
    x, y, lossfunc = torch.randn(5, 3), torch.randint(0, 3, (5,)), extend(nn.CrossEntropyLoss())
    plain = torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()])
    for _ in range(5):  # some are not measured
        model.zero_grad()
        loss = lossfunc(model(x), y)
        with backpack(BatchGrad(), gradient=gradient):
            loss.backward()
        for parameter, expected in zip(model.parameters(), plain, strict=True):
            oracle.assert_close(parameter.grad_batch.sum(0), expected)
            if parameter.grad is not None:
                oracle.assert_close(parameter.grad, expected)
            is_left_out = gradient == "none" and parameter is not model.weight
            assert (parameter.grad is None) == is_left_out


class Held(nn.Module):
    """Uses its parameter by another way, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.held = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held[0] * self.weight


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_parameter_that_is_used_by_another_way() -> None:
    classification(nn.Sequential(nn.Linear(3, 3), Held()), (3,)).check()


@pytest.mark.parametrize("scale", [1e-3, 1e-1])
def test_the_exponential_of_a_small_matrix(scale: float) -> None:
    """Torch's formula has an error of 1e-10 there, which is another one for each gradient."""
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    original: Any = layer.parametrizations.weight.original  # type: ignore[union-attr]
    with torch.no_grad():
        original.copy_(0.01 * torch.randn(4, 4) - torch.eye(4))
    model = extend(Net(lambda net, x: scale * net.b(net.a(x)), a=layer, b=nn.Linear(4, 3)))
    with backpack(BatchGrad()):
        model(torch.ones(8, 4)).square().sum().backward()
    oracle.assert_close(original.grad_batch.sum(0), original.grad, rtol=1e-8)
