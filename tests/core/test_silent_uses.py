"""Parameters that a module uses, and a function that sends them no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import InternalError
from backpack_core.extensions import KFLR, BatchGrad, ClippedSumGrad, DiagGGNExact
from backpack_operations.sink import ChunkSink, GraphSink, SharedSink
from tests import oracle
from tests.cases import Net, Problem
from tests.faults.problems import KINDS, expect
from tests.nets.own_functions import Silent

LAYERS: dict[str, tuple[Callable[[], Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(4, 4), (4,)),
    "Conv": (lambda: nn.Conv1d(2, 2, 1), (2, 2)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (4,)),
    "RNNCell": (lambda: nn.RNNCell(4, 4), (4,)),
    "GRU": (lambda: nn.GRU(2, 2, batch_first=True), (2, 2)),
    "without a rule": (
        lambda: Net(
            lambda net, x: net.inner(x) * net.by,
            inner=nn.Linear(4, 4),
            by=nn.Parameter(torch.randn(4)),
        ),
        (4,),
    ),
}
Forward = Callable[[Any, Tensor], Tensor]


def _called(net: Any, x: Tensor) -> Tensor:
    found = net.layer(x)
    result: Tensor = torch.tanh(found[0] if isinstance(found, tuple) else found)
    return result


def _silent(net: Any, x: Tensor) -> Tensor:
    """With the parameters that are named; all others are used once."""
    for name, parameter in net.layer.named_parameters():
        if net.which in name:
            x = Silent.apply(x, parameter)  # type: ignore[no-untyped-call]
    return x


def _checkpointed(net: Any, x: Tensor) -> Tensor:
    found: Any = checkpoint(lambda y: _silent(net, _called(net, y)), x, use_reentrant=False)
    return net.out(found.flatten(1))


WAYS: dict[str, Forward] = {
    "after": lambda net, x: net.out(_silent(net, _called(net, x)).flatten(1)),
    "before": lambda net, x: net.out(_called(net, _silent(net, x)).flatten(1)),
    "twice": lambda net, x: net.out(
        _called(net, _silent(net, _called(net, _silent(net, x)))).flatten(1)
    ),
    "checkpoint": _checkpointed,
}

CASES = [(name, way) for name in LAYERS for way in WAYS if (name, way) != ("GRU", "twice")]


def _problem(name: str, way: str, which: str = "", samples: int = 3, **options: Any) -> Problem:
    make, shape = LAYERS[name]
    net = Net(WAYS[way], layer=make(), out=nn.Linear(4, 3))
    net.which = which
    target = torch.randint(0, 3, (samples,))
    return Problem(net, (torch.randn(samples, *shape),), nn.CrossEntropyLoss(**options), target)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_what_other_uses_found_is_read(name: str, way: str, kind: str) -> None:
    problem = _problem(name, way)
    expectation = expect(problem.expected, kind)
    problem.run(*expectation.extensions, check="always")
    expectation.compare(problem.parameters)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_one_of_the_parameters(which: str, samples: int, reduction: str) -> None:
    for kind in KINDS:
        problem = _problem("Linear", "after", which, samples, reduction=reduction)
        expectation = expect(problem.expected, kind)
        problem.run(*expectation.extensions)
        expectation.compare(problem.parameters)


def test_the_other_one_is_frozen() -> None:
    problem = _problem("Linear", "before", "weight")
    problem.model.layer.bias.requires_grad_(False)  # type: ignore[union-attr]
    problem.check()


def test_the_bound_of_clipped_sums_is_met() -> None:
    problem = _problem("Linear", "after", samples=1)
    problem.run(ClippedSumGrad(1e-3, normaliser=None))
    size = torch.cat([g.flatten() for g in problem.fields("grad_clipped")]).norm()
    torch.testing.assert_close(size, torch.tensor(1e-3, dtype=size.dtype), rtol=1e-10, atol=0)


def test_kronecker_factors_are_those_of_the_module() -> None:
    """What a function sends nothing to has no rows of its own."""
    problem = _problem("Linear", "after", "weight")
    problem.run(KFLR())
    found = problem.model.layer.weight.kflr  # type: ignore[union-attr]
    assert [len(factor) for factor in found] == [4, 4]


@pytest.mark.parametrize("gradient", ["shared", "none", "skipped"])
def test_without_the_plain_gradient(gradient: Any) -> None:
    for kind in KINDS:
        problem = _problem("Linear", "after")
        expectation = expect(problem.expected, kind)
        problem.run(*expectation.extensions, gradient=gradient)
        if gradient != "shared":
            del expectation.fields["grad"]
        expectation.compare(problem.parameters)


@pytest.mark.parametrize("by_grad", [False, True])
def test_gradients_of_some_are_asked_for(by_grad: bool) -> None:
    """A parameter that is none of them, and that autograd reaches in part, gets nothing."""
    problem = _problem("Linear", "after")
    wanted = problem.expected(oracle.individual_gradients)
    weight, bias, *_ = problem.parameters
    for asked in ([weight], [weight, bias]):
        loss = problem.loss()
        with backpack(BatchGrad()):
            if by_grad:
                torch.autograd.grad(loss, asked)
            else:
                loss.backward(inputs=asked)
        torch.testing.assert_close(weight.grad_batch, wanted[0])  # type: ignore[attr-defined]
        assert hasattr(bias, "grad_batch") == (bias in {*asked})
        problem.model.zero_grad()


def _reentrant(net: Any, x: Tensor) -> Tensor:
    def whole(y: Tensor) -> Tensor:
        found: Tensor = net.out(_silent(net, _called(net, y)))
        return found

    found: Any = checkpoint(whole, x.clone().requires_grad_(), use_reentrant=True)
    return found


def _in_a_hook(loss: Tensor, asked: list[nn.Parameter]) -> None:
    outer = torch.zeros((), requires_grad=True)
    outer.register_hook(lambda _: loss.backward())
    (2 * outer).backward()


PASSES: dict[str, Callable[[Tensor, list[nn.Parameter]], Any]] = {
    "whole": lambda loss, asked: loss.backward(),
    "some": lambda loss, asked: loss.backward(inputs=asked[:1]),
    "gradients": lambda loss, asked: torch.autograd.grad(loss, asked),
    "in a hook": _in_a_hook,
}
WHOLE = PASSES["whole"]


@pytest.mark.parametrize("way", [*PASSES, "reentrant", "chunks"])
def test_no_pass_ends_while_something_waits(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem("Linear", "after")
    extension = DiagGGNExact(chunk_size=1) if way == "chunks" else BatchGrad()
    if way == "reentrant":
        problem.model.function = _reentrant  # type: ignore[assignment]
    loss, message = problem.loss(), r"'(weight|bias)' of Linear 'layer' waits"
    monkeypatch.setattr(GraphSink, "waits_for", lambda self, parameter: [])
    with backpack(extension), pytest.raises(InternalError, match=message):
        PASSES.get(way, WHOLE)(loss, problem.parameters)


def test_no_chunk_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem("Linear", "after")
    loss = problem.loss()
    monkeypatch.setattr(SharedSink, "note", _note_in_chunks_only(SharedSink.note))
    with backpack(DiagGGNExact(chunk_size=1)), pytest.raises(InternalError, match="waits"):
        loss.backward()


def _note_in_chunks_only(note: Callable[..., None]) -> Callable[..., None]:
    def replaced(sink: SharedSink, *given: Any) -> None:
        if isinstance(sink, ChunkSink):
            note(sink, *given)

    return replaced


@pytest.mark.parametrize("way", ["whole", "some", "gradients"])
def test_a_gradient_penalty_on_a_norm(way: str) -> None:
    """The second derivative of the norm takes its bias, and sends it nothing."""
    net = extend(nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double())
    x = torch.randn(3, 4, dtype=torch.float64)

    def penalised(x: Tensor) -> Tensor:
        inner = x.clone().requires_grad_()
        output = net(inner)
        (slope,) = torch.autograd.grad(output.sum(), inner, create_graph=True)
        result: Tensor = output.square().sum() + slope.square().sum()
        return result

    parameters = [*net.parameters()]
    each = [torch.autograd.grad(penalised(x[n : n + 1]), parameters) for n in range(3)]
    with backpack(BatchGrad()):
        PASSES[way](penalised(x), parameters)
    for parameter, *expected in zip(parameters[: 1 if way == "some" else 4], *each, strict=False):
        oracle.assert_close(parameter.grad_batch, torch.stack(expected))  # type: ignore[attr-defined]
