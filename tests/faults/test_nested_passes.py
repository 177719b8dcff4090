"""Backward passes after one that failed, and inside one that is under way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack
from backpack_core.errors import BackpackError
from backpack_core.extensions import (
    KFRA,
    BatchGrad,
    ClippedSumGrad,
    DiagHessian,
    GGNGram,
    SumGradSquared,
)
from tests import oracle
from tests.cases import Net, Problem, classification, mlp
from tests.faults.problems import KINDS, clipped, expect, middle
from tests.versions import is_older

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


class Stop(Exception):
    """Raised in the middle of a pass."""


class Flaky(torch.autograd.Function):
    """The identity; its backward pass raises what it finds in a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, errors: list[BaseException]) -> Tensor:
        ctx.errors = errors
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.errors:
            raise ctx.errors.pop()
        return grad, None


def _forward(net: Any, x: Tensor) -> Tensor:
    return net.last(net.a(net.between(torch.tanh(net.a(x)))))  # type: ignore[no-any-return]


def shared(between: nn.Module) -> Net:
    """A layer that is called twice, and a module between the calls."""
    return Net(_forward, a=nn.Linear(3, 3), between=between, last=nn.Linear(3, 3))


def _fail_at(count: int, error: BaseException) -> Callable[[nn.Module], None]:
    calls = []

    def hook(module: nn.Module) -> None:
        calls.append(module)
        if len(calls) == count:
            raise error

    return hook


def _raise(error: type[BaseException]) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        raise error  # one of its own each time: it holds the frames that it went through

    return hook


# What goes on between the two calls, and what is wrong with the first pass.
CAUSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    # at the second of the two calls, after others have read it
    "extension": (nn.Identity, lambda: {"extensions": [DiagHessian(), KFRA()]}),
    # between the calls
    "rule": (
        lambda: Net(lambda net, x: x * net.w, w=nn.Parameter(torch.randn(3))),
        lambda: {"extensions": [SumGradSquared(savefield="other", fail_mode="error")]},
    ),
    "function": (
        lambda: Net(lambda net, x: Flaky.apply(x, net.errors)),  # type: ignore[no-untyped-call]
        lambda: {"errors": [Stop()]},
    ),
    "gradient_hook": (nn.Identity, lambda: {"hook": _raise(Stop)}),
    "extension_hook": (nn.Identity, lambda: {"extension_hook": _fail_at(3, Stop())}),
    "last_extension_hook": (nn.Identity, lambda: {"extension_hook": _fail_at(5, Stop())}),
    "interrupt": (nn.Identity, lambda: {"extension_hook": _fail_at(3, KeyboardInterrupt())}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cause", CAUSES)
def test_pass_after_a_failed_one(cause: str, kind: str) -> None:
    """Over the same graph, in which two calls share a layer."""
    make, settings = CAUSES[cause]
    problem = classification(shared(make()), (3,))
    between: Any = problem.model.between
    between.errors = []
    expectation = expect(problem.expected, kind)
    options = settings()
    between.errors = options.pop("errors", [])
    more = options.pop("extensions", [])
    handle = problem.parameters[0].register_hook(options.pop("hook", lambda g: None))
    loss = problem.loss()
    with (
        pytest.raises((Stop, KeyboardInterrupt, BackpackError)),
        backpack(*expectation.extensions, *more, retain_graph=True, **options),
    ):
        loss.backward(retain_graph=True)
    handle.remove()
    problem.model.zero_grad()
    with backpack(*expectation.extensions):
        loss.backward()
    expectation.compare(problem.parameters)


# Passes inside a pass.


def begin(where: str, problem: Problem, inner: Callable[[], None]) -> dict[str, Any]:
    """Let ``inner`` be called once during the next backward pass; options for ``backpack``."""
    todo = [inner]
    if where == "accumulated" and is_older("2.7"):
        pytest.skip("torch 2.6 by itself waits for ever where such a hook begins a pass")

    def run(*_: Any) -> None:
        if todo:
            todo.pop()()

    def on_output(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(run)

    model: Any = problem.model
    if where == "extension_hook":
        return {"extension_hook": run}
    if where == "gradient_hook":
        model[2].weight.register_hook(run)
    elif where == "accumulated":
        model[2].bias.register_post_accumulate_grad_hook(run)
    elif where == "output":
        model[1].register_forward_hook(on_output)
    else:
        model[1].register_full_backward_hook(run)
    return {}


def eigenvalues(problem: Problem) -> Tensor:
    """The largest ``(C - 1)·N`` of the Gauss-Newton matrix of all parameters, by autograd."""

    def jacobians(forward: Any, _: Any, inputs: Any, *rest: Any) -> list[Tensor]:
        return oracle.jacobians(oracle.rows(forward, inputs, rest[1]), rest[0])

    jacobian = torch.cat(problem.expected(jacobians), 2)
    with torch.no_grad():
        output = problem.model(*problem.inputs)
    hessian = oracle.loss_hessians(lambda out: problem.lossfunc(out, problem.target), output)
    matrix = torch.einsum("nca,ncd,ndb->ab", jacobian, hessian, jacobian)
    return torch.linalg.eigvalsh(matrix).flip(0)[: output.numel() - len(output)]


WHERE = ("extension_hook", "gradient_hook", "accumulated", "output", "module_hook")


@pytest.mark.parametrize(("batch", "how"), [(3, "backward"), (4, "backward"), (3, "grad")])
@pytest.mark.parametrize("where", WHERE)
def test_pass_of_another_model(where: str, batch: int, how: str) -> None:
    """Each of the two passes sees its own norms and its own spectrum."""
    outer, inner = classification(mlp(), (3,)), classification(mlp(), (3,), batch)
    gradients = [p.expected(oracle.individual_gradients) for p in (outer, inner)]
    spectra = [eigenvalues(p) for p in (outer, inner)]
    bound = middle(gradients[0])
    inner_loss = inner.loss()

    def run() -> None:
        if how == "backward":
            inner_loss.backward()
        else:
            torch.autograd.grad(inner_loss, inner.parameters)

    options = begin(where, outer, run)
    loss = outer.loss()
    with backpack(BatchGrad(), ClippedSumGrad(bound, normaliser=None), GGNGram(), **options):
        loss.backward()
    for problem, expected, values in zip((outer, inner), gradients, spectra, strict=True):
        problem.compare("grad_batch", expected)
        problem.compare("grad_clipped", clipped(expected, bound))
        for block in problem.fields("ggn_gram"):
            oracle.assert_close(block.spectrum.eigenvalues, values)


@pytest.mark.parametrize("where", WHERE)
def test_second_pass_of_the_same_model(where: str) -> None:
    """What is stored at the end of the outer pass is what it would be alone."""
    problem = classification(mlp(), (3,))
    other = Problem(problem.model, (torch.randn(3, 3),), problem.lossfunc, torch.tensor([2, 1, 0]))
    gradients = problem.expected(oracle.individual_gradients)
    values = eigenvalues(problem)
    bound = middle(gradients)
    inner_loss = other.loss()
    options = begin(where, problem, lambda: inner_loss.backward())
    loss = problem.loss()
    with backpack(ClippedSumGrad(bound, normaliser=None), GGNGram(), **options):
        loss.backward()
    problem.compare("grad_clipped", clipped(gradients, bound))
    for block in problem.fields("ggn_gram"):
        oracle.assert_close(block.spectrum.eigenvalues, values)


@pytest.mark.parametrize("where", WHERE)
def test_pass_under_a_block_of_its_own(where: str) -> None:
    outer, inner = classification(mlp(), (3,)), classification(mlp(), (3,), 4)
    expectations = [expect(p.expected, "gradients") for p in (outer, inner)]
    inner_loss = inner.loss()

    def run() -> None:
        with backpack(*expectations[1].extensions):
            inner_loss.backward()

    options = begin(where, outer, run)
    loss = outer.loss()
    with backpack(*expectations[0].extensions, **options):
        loss.backward()
    for problem, expectation in zip((outer, inner), expectations, strict=True):
        expectation.compare(problem.parameters)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERE)
def test_inner_pass_that_fails(where: str, kind: str) -> None:
    """The outer one does not notice."""
    outer, inner = classification(mlp(), (3,)), classification(mlp(), (3,))
    expectation = expect(outer.expected, kind)
    inner_loss = inner.loss()
    inner.parameters[0].register_hook(_raise(Stop))

    def run() -> None:
        with pytest.raises(Stop):
            inner_loss.backward()

    options = begin(where, outer, run)
    loss = outer.loss()
    with backpack(*expectation.extensions, **options):
        loss.backward()
    expectation.compare(outer.parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_pass_inside_a_pass_inside_a_pass(kind: str) -> None:
    problems = [classification(mlp(), (3,)) for _ in range(3)]
    expectations = [expect(p.expected, kind) for p in problems]
    if kind == "gradients":
        bound = middle(problems[0].expected(oracle.individual_gradients))
        for problem, expectation in zip(problems, expectations, strict=True):
            individual = problem.expected(oracle.individual_gradients)
            expectation.fields["grad_clipped"] = clipped(individual, bound)
    losses = [problem.loss() for problem in problems]
    for problem, following in zip(problems, losses[1:], strict=False):
        begin("gradient_hook", problem, following.backward)
    with backpack(*expectations[0].extensions):
        losses[0].backward()
    for problem, expectation in zip(problems, expectations, strict=True):
        expectation.compare(problem.parameters)


def test_checkpoint_is_a_part_of_the_pass() -> None:
    """The pass that a re-entrant checkpoint begins belongs to the one it lies in."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = checkpoint(net.inner, net.a(x), use_reentrant=True)
        return net.last(hidden)  # type: ignore[no-any-return]

    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    problem = classification(
        Net(forward, a=nn.Linear(3, 4), inner=inner, last=nn.Linear(4, 3)), (3,)
    )
    plain = Net(
        lambda net, x: net.last(net.inner(net.a(x))), **dict(problem.model.named_children())
    )
    reference = Problem(plain, problem.inputs, problem.lossfunc, problem.target)
    expectation = expect(reference.expected, "gradients")
    problem.run(*expectation.extensions)
    expectation.compare(problem.parameters)


# Parameters that an optimiser changes while the pass is under way.


def _recurrent(net: Any, x: Tensor) -> Tensor:
    return net.last(net.inner(net.first(x))[0].flatten(1))  # type: ignore[no-any-return]


def _attending(net: Any, x: Tensor) -> Tensor:
    tokens = net.first(x)
    attended = net.inner(tokens, tokens, tokens, need_weights=False)[0]
    return net.last(attended.flatten(1))  # type: ignore[no-any-return]


def _framed(forward: Callable[..., Tensor], inner: nn.Module) -> Net:
    return Net(forward, first=nn.Linear(2, 2), inner=inner, last=nn.Linear(4, 3))


STEPPED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "mlp": (mlp, (3,), True),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)),
        (2, 3),
        True,
    ),
    "layer_norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 3)),
        (3,),
        True,
    ),
    "lstm": (lambda: _framed(_recurrent, nn.LSTM(2, 2, batch_first=True)), (2, 2), False),
    "gru": (lambda: _framed(_recurrent, nn.GRU(2, 2, batch_first=True)), (2, 2), False),
    "rnn": (lambda: _framed(_recurrent, nn.RNN(2, 2, batch_first=True)), (2, 2), False),
    "attention": (
        lambda: _framed(_attending, nn.MultiheadAttention(2, 2, batch_first=True)),
        (2, 2),
        False,
    ),
}


@pytest.mark.parametrize("name", STEPPED)
def test_optimiser_in_a_hook(name: str) -> None:
    """Exact, or an error where the weights of the forward pass are gone."""
    make, shape, is_exact = STEPPED[name]
    problem = classification(make(), shape)
    expectation = expect(problem.expected, "gradients")

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter))

    loss = problem.loss()
    for parameter in problem.parameters:
        parameter.register_post_accumulate_grad_hook(step)
    refusals = () if is_exact else (BackpackError, RuntimeError)
    with suppress(*refusals):
        with backpack(*expectation.extensions):
            loss.backward()
        expectation.compare(problem.parameters)
