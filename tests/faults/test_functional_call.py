"""Calls with other tensors in the place of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from backpack_core import Extension, backpack, extend, unextend
from backpack_core.errors import BackpackError, UnsupportedError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.faults.changes import REPLACED, between, deep, trained_norm
from tests.faults.problems import KINDS, Expectation, expect

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


def compare_call(problem: Problem, tensors: dict[str, Tensor], kind: str) -> None:
    """One pass with ``tensors`` as parameters and buffers, compared on these."""
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    expectation = expect_of_call(problem, tensors, kind)
    loss = lossfunc(functional_call(model, tensors, problem.inputs), problem.target)
    with backpack(*expectation.extensions):
        loss.backward()
    expectation.compare(trained(tensors))
    expectation.absent(unused(problem, tensors))


def trained(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Those that want a gradient, each once."""
    return list({id(t): t for t in tensors.values() if t.requires_grad}.values())


def unused(problem: Problem, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The parameters that a call with other tensors does not see."""
    return [p for name, p in problem.model.named_parameters() if name in tensors]


def expect_of_call(problem: Problem, tensors: dict[str, Tensor], kind: str) -> Expectation:
    """By autograd, with the same tensors in an untouched copy of the model."""

    def compute(quantity: Callable[..., list[Tensor]]) -> list[Tensor]:
        model = unextend(copy.deepcopy(problem.model))
        return quantity(
            lambda x: functional_call(model, tensors, (x,)),
            lambda out: F.cross_entropy(out, problem.target),
            problem.inputs,
            trained(tensors),
        )

    return expect(compute, kind)


def fast_weights(model: nn.Module, kind: str, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Tensors in the place of parameters: leaves, other parameters, or results."""
    chosen = {n: p for n, p in model.named_parameters() if not names or n in names}
    drawn = {n: torch.randn_like(p) for n, p in chosen.items()}
    if kind == "leaves":
        return {n: tensor.requires_grad_() for n, tensor in drawn.items()}
    if kind == "parameters":
        return {n: nn.Parameter(tensor) for n, tensor in drawn.items()}
    return {n: p - 0.5 * drawn[n] for n, p in chosen.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", ["leaves", "results"])
@pytest.mark.parametrize(
    "name", ["all", "layer_norm", "lstm", "own", "attention", "prelu", "convolution"]
)
def test_functional_call(name: str, made: str, kind: str) -> None:
    make, shape, _ = REPLACED[name]
    problem = classification(make(), shape)
    compare_call(problem, fast_weights(problem.model, made), kind)


def _with_a_list(net: Net, x: Tensor) -> Tensor:
    h = net.first(x) * net.gains[0] + net.gains[1]  # type: ignore[operator, index]
    return net.last(torch.tanh(F.linear(h, net.unused.weight)))  # type: ignore[operator, union-attr]


def _as_argument(net: Net, x: Tensor) -> Tensor:
    h = net.first(x) @ net.unused(net.table)  # type: ignore[operator]
    return net.last(torch.tanh(h)) * net.gains[0].sum()  # type: ignore[operator, index]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", ["leaves", "parameters", "results"])
@pytest.mark.parametrize("forward", [_with_a_list, _as_argument])
def test_parameters_of_parts_that_are_never_called(forward: Any, made: str, kind: str) -> None:
    """Of a list, of a module whose weight is used, or given to a module as an argument."""
    model = Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 3))
    model.gains = nn.ParameterList([torch.randn(4), torch.randn(4)])
    model.unused, model.table = nn.Linear(4, 4, bias=False), nn.Parameter(torch.randn(4, 4))
    if forward is _with_a_list:
        del model.table
    problem = classification(model, (3,))
    tensors = fast_weights(problem.model, made)
    if forward is _as_argument:
        tensors["gains.1"].detach_()
    compare_call(problem, tensors, kind)


def test_a_part_that_came_after_the_first_run() -> None:
    """It has a parameter that a function uses, and is never called."""
    model = Net(_with_a_list, first=nn.Linear(3, 4), last=nn.Linear(4, 3))
    model.gains = nn.ParameterList([torch.randn(4), torch.randn(4)])
    model.unused = nn.Linear(4, 4, bias=False)
    problem = classification(model, (3,))
    problem.run(BatchGrad())
    model.unused = nn.Linear(4, 4, bias=False)
    tensors = fast_weights(model, "leaves")
    expectation = expect_of_call(problem, tensors, "gradients")
    output = functional_call(model, tensors, problem.inputs)
    with backpack(*expectation.extensions):
        problem.lossfunc(output, problem.target).backward()
    expectation.compare(trained(tensors))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", ["leaves", "results"])
def test_functional_call_with_some_parameters(made: str, kind: str) -> None:
    """The others are used as they are, and get their quantities."""
    problem = classification(deep(), (3,))
    some = fast_weights(problem.model, made, ["2.weight", "4.bias"])
    everything = {**dict(problem.model.named_parameters()), **some}
    expectation = expect_of_call(problem, everything, kind)
    extend(problem.model), extend(problem.lossfunc)
    loss = problem.lossfunc(functional_call(problem.model, some, problem.inputs), problem.target)
    with backpack(*expectation.extensions):
        loss.backward()
    if made == "results":
        expectation.fields.pop("grad")  # that of the model's own weights has two parts
    expectation.compare(trained(everything))
    expectation.absent(unused(problem, some))


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_with_buffers(kind: str) -> None:
    problem = classification(between(trained_norm)(), (3,))
    tensors = fast_weights(problem.model, "leaves")
    tensors["1.running_mean"], tensors["1.running_var"] = torch.randn(4), 2.0 + torch.rand(4)
    compare_call(problem, tensors, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_with_a_tied_weight(kind: str) -> None:
    """One tensor for two modules."""
    parts = {"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)}
    problem = classification(Net(lambda net, x: net.b(torch.tanh(net.a(x))), **parts), (3,))
    shared = torch.randn(3, 3, requires_grad=True)
    compare_call(problem, {"a.weight": shared, "b.weight": shared}, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_inner_loop(steps: int, kind: str) -> None:
    """Fast weights by some steps of gradient descent, whose own gradients are constants."""
    problem = classification(deep(), (3,))
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    tensors = dict(model.named_parameters())
    support, answers = torch.randn(5, 3), torch.randint(0, 3, (5,))
    for _ in range(steps):
        loss = lossfunc(functional_call(model, tensors, (support,)), answers)
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        pairs = zip(tensors.items(), gradients, strict=True)
        tensors = {name: tensor - 0.5 * g for (name, tensor), g in pairs}
    compare_call(problem, tensors, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_inner_loop_that_is_differentiated(kind: str) -> None:
    """The inner gradient belongs to the graph: exact on the fast weights, or refused."""
    problem = classification(deep(), (3,))
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    own = dict(model.named_parameters())
    loss = lossfunc(model(torch.randn(5, 3)), torch.randint(0, 3, (5,)))
    gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    pairs = zip(own.items(), gradients, strict=True)
    fast = {name: p - 0.5 * g for (name, p), g in pairs}
    detached = {name: tensor.detach().requires_grad_() for name, tensor in fast.items()}
    expectation = expect_of_call(problem, detached, kind)
    loss = lossfunc(functional_call(model, fast, problem.inputs), problem.target)
    try:
        with backpack(*expectation.extensions):
            loss.backward()
    except BackpackError:
        return
    expectation.compare(fast.values())
    expectation.absent(own.values())


@pytest.mark.parametrize("kind", KINDS)
def test_several_tasks_in_one_pass(kind: str) -> None:
    """Each has weights of its own, and a loss of its own."""
    problem = classification(deep(), (3,))
    other = classification(problem.model, (3,))
    tasks = [(p, fast_weights(problem.model, "results")) for p in (problem, other)]
    expectations = [expect_of_call(p, tensors, kind) for p, tensors in tasks]
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    losses = [lossfunc(functional_call(model, t, p.inputs), p.target) for p, t in tasks]
    with backpack(*expectations[0].extensions):
        torch.stack(losses).sum().backward()
    for expectation, (_, tensors) in zip(expectations, tasks, strict=True):
        expectation.fields.pop("grad_clipped", None)  # its norm is one over both tasks
        expectation.compare(tensors.values())
        expectation.absent(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_call_with_other_tensors_after_one_of_the_model_itself(kind: str) -> None:
    """What the first stored is no value of the second."""
    problem = classification(deep(), (3,))
    own = expect(problem.expected, kind)
    problem.run(*own.extensions)
    own.compare(problem.parameters)
    problem.model.zero_grad()
    compare_call(problem, fast_weights(problem.model, "leaves"), kind)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_an_inner_step_on_as_many_samples_is_refused(extension: type[Extension]) -> None:
    """Rows at the inner calls are those of the support set, whose number is the same by chance."""
    problem = classification(deep(), (3,))
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    own, (x,) = dict(model.named_parameters()), problem.inputs
    inner = lossfunc(functional_call(model, own, (torch.randn_like(x),)), problem.target)
    gradients = torch.autograd.grad(inner, list(own.values()), create_graph=True)
    fast = {n: p - 0.5 * g for (n, p), g in zip(own.items(), gradients, strict=True)}
    loss = lossfunc(functional_call(model, fast, (x,)), problem.target)
    advice = "without create_graph=True"
    with backpack(extension()), pytest.raises(UnsupportedError, match=advice):
        loss.backward()
    for parameter in own.values():  # a gradient with a graph is a cycle
        parameter.grad = None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_weights(norm: Callable[[nn.Module], nn.Module], kind: str) -> None:
    model = deep()
    norm(model[2])
    compare_call(classification(model, (3,)), fast_weights(model, "leaves"), kind)


def test_parameters_behind_a_parametrization_that_were_replaced() -> None:
    """Before the backward pass: the results lie on those of the forward pass."""
    model = nn.Sequential(nn.Linear(3, 3), parametrizations.weight_norm(nn.Linear(3, 3)))
    problem = classification(model, (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss, before = problem.loss(), [*model.parameters()]
    model.load_state_dict({n: 2 * v for n, v in model.state_dict().items()}, assign=True)
    with backpack(BatchGrad()):
        loss.backward()
    for parameter, right in zip(before, expected, strict=True):
        torch.testing.assert_close(parameter.grad_batch, right)  # type: ignore[attr-defined]
