"""``torch.compile``: the compiler sees no hooks, and blocks run compiled code as it was written.

A graph that was compiled before a block says that it has no modules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from backpack_core import backpack, extend
from backpack_core.errors import BridgeError, UnsupportedError, UsageError
from backpack_core.extensions import GGNMP, HMP, BatchGrad, DiagGGNExact
from backpack_data import accumulate
from backpack_secondorder.over_data import GGN
from tests import oracle
from tests.cases import Problem, classification, mlp
from tests.versions import is_older


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: nn.Module, extend_first: bool) -> nn.Module:
    if extend_first:
        return torch.compile(extend(model), backend="aot_eager")
    return extend(torch.compile(model, backend="aot_eager"))


def residual() -> Problem:
    """Functions between the modules, a shared one, and one that is called inside another."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh())
            self.last = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h = h + self.shared(h)
            result: Tensor = self.last(self.shared(h) * torch.sigmoid(h))
            return result

    return classification(Residual(), (4,), batch=5)


def after_a_plain_pass(model: nn.Module, backend: Any) -> Any:
    """Extended when it was compiled, and has run."""
    fast = torch.compile(model, backend=backend, fullgraph=True)
    fast(torch.randn(5, 4)).sum().backward()
    extend(model)
    return fast


def in_place(model: nn.Module, backend: Any) -> Any:
    """By the module's own method."""
    extend(model).compile(backend=backend, fullgraph=True)
    return model


Make = Callable[[nn.Module, Any], Any]
WAYS: dict[str, Make] = {
    "extended first": lambda m, b: torch.compile(extend(m), backend=b, fullgraph=True),
    "compiled first": lambda m, b: extend(torch.compile(m, backend=b, fullgraph=True)),
    "extended later": after_a_plain_pass,
    "in place": in_place,
}


@pytest.mark.parametrize("way", WAYS)
def test_plain_passes_are_one_graph(way: str) -> None:
    """``fullgraph`` raises at the first break."""
    counter = CompileCounter()
    fast = WAYS[way](residual().model, counter)
    for _ in range(2):
        fast(torch.randn(5, 4)).sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("way", WAYS)
def test_inside_a_block_every_quantity_is_exact(way: str) -> None:
    """And what was compiled is used again behind it."""
    problem, counter = residual(), CompileCounter()
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    fast = WAYS[way](problem.model, counter)
    lossfunc = extend(problem.lossfunc)
    for _ in range(2):
        with backpack(BatchGrad(), DiagGGNExact()):
            lossfunc(fast(*problem.inputs), problem.target).backward()
        problem.compare("grad_batch", gradients)
        problem.compare("diag_ggn_exact", diagonals)
    ran = counter.frame_count
    problem.lossfunc(fast(*problem.inputs), problem.target).backward()
    assert counter.frame_count == 1
    assert ran == (way == "extended later")


def test_nested_blocks_and_those_of_other_threads() -> None:
    """The compiler is on again behind the last of them."""
    counter = CompileCounter()
    fast = torch.compile(residual().model, backend=counter)
    x, inside, leave = torch.randn(5, 4), threading.Event(), threading.Event()

    def other() -> None:
        with backpack():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with backpack():
        with backpack():
            thread.start()
            inside.wait(10)
        fast(x)
    fast(x)
    assert counter.frame_count == 0
    leave.set()
    thread.join()
    fast(x)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:.*Dynamo")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_block_inside_compiled_code_is_refused(fullgraph: bool) -> None:
    problem = classification(mlp(), (3,))
    extend(problem.model), extend(problem.lossfunc)

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def step() -> None:
        with backpack(BatchGrad()):
            problem.loss().backward()

    expected: type[Exception] = torch._dynamo.exc.Unsupported if fullgraph else UsageError
    # The compiler of torch 2.6 does not get as far, and says what it cannot compile before.
    is_sooner = fullgraph and is_older("2.7")
    said = None if is_sooner else r"inside a function that torch\.compile compiles"
    with pytest.raises(expected, match=said):
        step()


def test_a_block_leaves_the_compiler_as_it_was() -> None:
    from torch._dynamo import eval_frame

    with torch.compiler.set_stance("eager_on_recompile"):
        with backpack():
            assert eval_frame._stance.stance == "force_eager"
        assert eval_frame._stance.stance == "eager_on_recompile"


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("extend_first", [True, False])
def test_what_is_inside_is_refused(extend_first: bool, extension: Any) -> None:
    problem = classification(mlp(), (3,))
    model, lossfunc = compiled(problem.model, extend_first), extend(problem.lossfunc)
    loss = lossfunc(model(*problem.inputs), problem.target)
    with pytest.raises(BridgeError, match=r"compiled by torch\.compile"), backpack(extension()):
        loss.backward()


def test_the_model_that_was_compiled_has_every_quantity() -> None:
    """Compiled for plain passes, as it is for those with extensions."""
    problem = classification(mlp(), (3,))
    fast = torch.compile(problem.model, backend="aot_eager")
    plain = problem.lossfunc(fast(*problem.inputs), problem.target)
    plain.backward()
    problem.check()


@pytest.mark.parametrize("extension", [GGNMP, HMP])
def test_products_of_what_was_compiled_are_refused(extension: Any) -> None:
    problem = classification(mlp(), (3,))
    model, lossfunc = compiled(problem.model, True), extend(problem.lossfunc)
    loss = lossfunc(model(*problem.inputs), problem.target)
    with backpack(extension()):
        loss.backward(retain_graph=True)
    first = problem.parameters[0]
    with pytest.raises(UnsupportedError, match="inside the block"):
        getattr(first, extension.savefield)(torch.ones(1, *first.shape))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_over_data(backend: str) -> None:
    """The model runs as it was written."""
    problem = classification(mlp(), (3,), batch=5)
    fast = torch.compile(problem.model, backend=backend)
    problem.lossfunc(fast(*problem.inputs), problem.target).backward()
    batches = list(zip(problem.inputs[0].split(3), problem.target.split(3), strict=True))
    of_both = [
        (accumulate(model, problem.lossfunc, batches, DiagGGNExact(), progress=False), operator)
        for model in (fast, problem.model)
        for operator in [GGN(model, problem.lossfunc, batches)]
    ]
    (found, ours), (expected, reference) = of_both
    for ((_, field), value), other in zip(found.items(), expected.values(), strict=True):
        assert field == "diag_ggn_exact"
        torch.testing.assert_close(value, other)
    vector = torch.randn(ours.shape[0])
    torch.testing.assert_close(ours @ vector, reference @ vector)
