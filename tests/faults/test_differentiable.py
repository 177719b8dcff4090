"""Quantities that are differentiated themselves, where modules return what they were given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend, unextend
from backpack_core.errors import BackpackError
from backpack_core.extensions import GGNMP, BatchGrad, DiagGGNExact, SumGradSquared
from backpack_products.tuning import memory_budget, set_memory_budget
from tests.cases import Net, Problem, classification
from tests.oracle import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")

FIELDS = ("grad_batch", "sum_grad_squared", "diag_ggn_exact")


def quantities(model: nn.Module, problem: Problem) -> dict[str, list[Tensor]]:
    """All three by autograd, as functions of the parameters."""
    (x,), y = problem.inputs, problem.target
    parameters = list(model.parameters())
    gradients: list[list[Tensor]] = [[] for _ in parameters]
    diagonals: list[Tensor] = [torch.zeros_like(p) for p in parameters]

    def derivative(value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)

    for n in range(len(x)):
        output = model(x[n : n + 1])
        loss = F.cross_entropy(output, y[n : n + 1]) / len(x)
        for of_parameter, gradient in zip(gradients, derivative(loss), strict=True):
            of_parameter.append(gradient)
        probabilities = output[0].softmax(0)
        hessian = (probabilities.diag() - probabilities.outer(probabilities)) / len(x)
        rows = [derivative(entry) for entry in output[0]]
        for position in range(len(parameters)):
            jacobian = torch.stack([row[position] for row in rows])
            diagonals[position] = diagonals[position] + torch.einsum(
                "c...,cd,d...->...", jacobian, hessian, jacobian
            )
    stacked = [torch.stack(of_parameter) for of_parameter in gradients]
    return {
        "grad_batch": stacked,
        "sum_grad_squared": [g.square().sum(0) for g in stacked],
        "diag_ggn_exact": diagonals,
    }


def check_derivative(problem: Problem, field: str) -> None:
    """The gradient of a random projection of a quantity."""
    model = unextend(copy.deepcopy(problem.model))
    expected = quantities(model, problem)[field]
    weights = [torch.randn_like(value) for value in expected]

    def project(found: list[Tensor], parameters: list[Any]) -> tuple[Tensor, ...]:
        terms = [(w * q).sum() for w, q in zip(weights, found, strict=True)]
        return torch.autograd.grad(torch.stack(terms).sum(), parameters, materialize_grads=True)

    reference = project(expected, list(model.parameters()))
    loss = problem.loss()
    with backpack(BatchGrad(), SumGradSquared(), DiagGGNExact()):
        torch.autograd.grad(loss, problem.parameters, create_graph=True)
    problem.compare(field, [value.detach() for value in expected])
    found = project(problem.fields(field), problem.parameters)
    for ours, theirs in zip(found, reference, strict=True):
        assert_close(ours, theirs)
    for parameter in problem.parameters:  # a cycle, through the graph that made them
        for name in FIELDS:
            delattr(parameter, name)


def framed(module: nn.Module, join: Callable[..., Tensor] = torch.add) -> Net:
    """A layer and an activation, a module of two outputs, and a layer for both of them."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(join(*net.module(net.tanh(net.first(x)))))  # type: ignore[no-any-return]

    return Net(forward, first=nn.Linear(3, 4), tanh=nn.Tanh(), module=module, last=nn.Linear(4, 3))


def own(function: Callable[..., Any], *children: str) -> Net:
    """A module without a rule, with a parameter."""
    return Net(
        function, w=nn.Parameter(torch.randn(4)), **{name: nn.Linear(4, 4) for name in children}
    )


def chain(*layers: nn.Module) -> nn.Sequential:
    """Layers between two linear ones."""
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 3))


def _shortcut(net: Any, x: Tensor) -> Tensor:
    hidden = net.first(x)
    return net.last(net.same(hidden) + net.tanh(net.same(hidden)))  # type: ignore[no-any-return]


def _outer(x: Tensor) -> Tensor:
    return x.sin()[:, :, None] + x[:, None]


MODELS: dict[str, Callable[[], nn.Module]] = {
    # a module without a rule returns its input among other things
    "and_product": lambda: framed(own(lambda net, x: (x, x * net.w))),
    "product_and": lambda: framed(own(lambda net, x: (x * net.w, x))),
    "and_nonlinear": lambda: framed(own(lambda net, x: (x, x.sin() * net.w))),
    "and_child": lambda: framed(own(lambda net, x: (x, net.child(x) * net.w), "child")),
    "only_the_other": lambda: framed(own(lambda net, x: (x, x * net.w)), lambda x, y: y),
    "multiplied": lambda: framed(own(lambda net, x: (x, (x * net.w).tanh())), torch.mul),
    "two_inputs": lambda: Net(
        lambda net, x: net.last(torch.add(*net.own(net.first(x), net.second(x)))),
        first=nn.Linear(3, 4),
        second=nn.Linear(3, 4),
        own=Net(lambda net, x, y: (x, x * y * net.w), w=nn.Parameter(torch.randn(4))),
        last=nn.Linear(4, 3),
    ),
    # statistics of the input, which vmap takes for constants
    "layer_norm": lambda: chain(own(lambda net, x: F.layer_norm(x, (4,), net.w))),
    "instance_norm": lambda: chain(
        own(lambda net, x: F.instance_norm(_outer(x), weight=net.w, eps=0.1)[..., 0])
    ),
    # modules with a rule
    "identity": lambda: chain(nn.Tanh(), nn.Identity()),
    "two_identities": lambda: chain(nn.Identity(), nn.Identity(), nn.Sigmoid(), nn.Identity()),
    "dropout": lambda: chain(nn.Sigmoid(), nn.Dropout()),
    "flatten": lambda: chain(nn.Tanh(), nn.Flatten()),
    "in_place_of_identity": lambda: chain(nn.Identity(), nn.SiLU(inplace=True)),
    "returned": lambda: chain(nn.Tanh(), Net(lambda _, x: x)),
    "shortcut": lambda: Net(
        _shortcut,
        first=nn.Linear(3, 4),
        same=nn.Identity(),
        tanh=nn.Tanh(),
        last=nn.Linear(4, 3),
    ),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", MODELS)
def test_derivatives(name: str, field: str) -> None:
    check_derivative(classification(MODELS[name]().eval(), (3,)), field)


@pytest.mark.parametrize("field", FIELDS)
def test_module_that_overwrites_its_input(field: str) -> None:
    """Exact, or refused."""
    model = chain(own(lambda net, x: x.mul_(net.w)), nn.Sigmoid())
    with suppress(BackpackError):
        check_derivative(classification(model, (3,)), field)


# Products under a small memory budget.


@pytest.fixture(params=[1, 100, None])
def _budget(request: pytest.FixtureRequest) -> Iterator[None]:
    before = memory_budget()
    if request.param is not None:
        set_memory_budget(request.param)
    yield
    set_memory_budget(before)


OWN: dict[str, Callable[[], Net]] = {
    "product": lambda: own(lambda net, x: torch.sin(x * net.w)),
    "two_outputs": lambda: own(lambda net, x: (x * net.w, x)[0]),
    "child": lambda: own(lambda net, x: net.child(x) * net.w, "child"),
}


@pytest.mark.usefixtures("_budget")
@pytest.mark.parametrize("name", OWN)
def test_products_need_no_graph(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), OWN[name](), nn.LayerNorm(4), nn.Linear(4, 3))
    problem = classification(model, (3,))
    problem.run(GGNMP(), GGNMP(savefield="some", subsampling=[2, 0]))
    for p in problem.parameters:
        vectors = torch.randn(2, *p.shape)
        assert not p.ggnmp(vectors).requires_grad  # type: ignore[attr-defined]
        assert not p.some(vectors).requires_grad  # type: ignore[attr-defined]


def test_a_loss_without_curvature_somewhere() -> None:
    """Its root has no derivative there, but what is made of the root has one."""
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.PoissonNLLLoss(log_input=False))
    x, counts = torch.rand(4, 3), torch.tensor([[0.0, 1.0], [2.0, 0.0]]).repeat(2, 1)
    with torch.no_grad():
        model.weight.abs_(), model.bias.fill_(0.5)
    with backpack(DiagGGNExact()):
        torch.autograd.grad(lossfunc(model(x), counts), model.weight, create_graph=True)
    found = torch.autograd.grad(model.weight.diag_ggn_exact.sum(), model.weight)[0]
    vars(model.weight).clear()
    rate = model(x)
    curvature = counts / (rate + 1e-8) ** 2 / rate.numel()
    diagonal = curvature.T @ x.square()
    assert_close(found, torch.autograd.grad(diagonal.sum(), model.weight)[0])


@pytest.mark.usefixtures("_budget")
def test_results_need_no_graph() -> None:
    problem = classification(chain(own(lambda net, x: torch.sin(x * net.w))), (3,))
    problem.run(BatchGrad(), SumGradSquared(), DiagGGNExact(subsampling=[1]))
    for field in FIELDS:
        assert not any(value.requires_grad for value in problem.fields(field))
