"""A block stands before autograd's engine, and changes nothing else of torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import backward, grad
from torch.autograd.graph import get_gradient_edge

from backpack_core import backpack, disable
from backpack_core.engine.active import stacks
from backpack_core.errors import UsageError
from backpack_core.extensions import KFAC, BatchGrad
from tests import oracle
from tests.cases import classification, mlp

ENGINE = torch.autograd._engine_run_backward


@pytest.fixture(autouse=True)
def _torch_has_its_own_back():
    assert torch.autograd._engine_run_backward is ENGINE
    yield
    assert torch.autograd._engine_run_backward is ENGINE


def calls_of(function: Callable[[], Any]) -> int:
    """How many functions of Python and C it calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_functions_of_torch_run_as_without_a_block() -> None:
    x = torch.ones(3)

    def work() -> Tensor:
        return (x.relu() + 1).sum()

    modes, calls = torch._C._len_torch_function_stack(), calls_of(work)
    with backpack():
        assert torch._C._len_torch_function_stack() == modes
        assert calls_of(work) == calls


WAYS: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "method": lambda loss, _: loss.backward(),
    "backward": lambda loss, _: backward(loss),
    "given": lambda loss, _: backward([loss], [torch.ones_like(loss)]),
    "edge": lambda loss, _: backward([get_gradient_edge(loss)], [torch.ones_like(loss)]),
    "inputs": lambda loss, parameters: loss.backward(inputs=parameters),
    "grad": lambda loss, parameters: grad(loss, parameters),
    "outputs": lambda loss, parameters: grad(
        (get_gradient_edge(loss),), parameters, (torch.ones_like(loss),), create_graph=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_begins_a_known_pass(way: str) -> None:
    """Functions that were imported before the block, too."""
    problem, known = classification(mlp(), (3,)), []
    loss, expected = problem.loss(), problem.expected(oracle.individual_gradients)
    with backpack(BatchGrad(), observer=lambda view: known.append(bool(context.announced))):
        (context,) = _contexts()
        WAYS[way](loss, problem.parameters)
        assert not context.announced
    assert known
    assert all(known)
    problem.compare("grad_batch", expected)


def _contexts() -> tuple[Any, ...]:
    return stacks[threading.get_ident()]


def test_errors_give_the_place_back() -> None:
    problem = classification(mlp(), (3,))
    with pytest.raises(ZeroDivisionError), backpack(BatchGrad()):
        raise ZeroDivisionError
    loss = problem.loss()
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), backpack(BatchGrad()):
        loss.backward()
    with disable(), pytest.raises(UsageError, match="inside disable"), backpack():
        pass
    assert torch.autograd._engine_run_backward is ENGINE
    with backpack(BatchGrad()):
        problem.loss().backward()  # what failed is not under way any more
        with backpack(BatchGrad()):
            problem.loss().backward()
        assert torch.autograd._engine_run_backward is not ENGINE


def test_two_threads_and_the_first_one_leaves_first() -> None:
    """Passes of a third one, without a block, are none of theirs."""
    entered, leave, problem = threading.Event(), threading.Event(), classification(mlp(), (3,))
    places: list[Any] = []

    def other() -> None:
        torch.set_default_dtype(torch.float64)
        with backpack(BatchGrad()):
            entered.set()
            assert leave.wait(30)
            problem.loss().backward()
            places.append(torch.autograd._engine_run_backward)

    thread = threading.Thread(target=other)
    with backpack():
        thread.start()
        assert entered.wait(30)
    places.append(torch.autograd._engine_run_backward)
    plain = classification(mlp(), (3,))
    plain.loss().backward()
    assert not any(hasattr(parameter, "grad_batch") for parameter in plain.parameters)
    leave.set()
    thread.join()
    assert len(places) == 2
    assert ENGINE not in places
    problem.compare("grad_batch", problem.expected(oracle.individual_gradients))


def test_several_gradients_at_once_are_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    y, several = x * 2, torch.eye(2)
    with backpack(observer=print), pytest.raises(UsageError, match="is_grads_batched=True"):
        grad(y, x, several, is_grads_batched=True, retain_graph=True)
    assert torch.equal(grad(y, x, several, is_grads_batched=True)[0], 2 * several)


@pytest.mark.parametrize("gradient", ["autograd", "skipped"])
def test_as_many_gradients_as_roots(gradient: Any) -> None:
    loss = classification(mlp(), (3,)).loss()
    block = backpack(KFAC(), gradient=gradient, check="never")
    with pytest.raises(RuntimeError, match="1 tensors and 0 gradients"), block:
        backward([loss], [])


@pytest.mark.host("it looks up the block of the thread that visits")
@pytest.mark.parametrize("gradient", ["autograd", "none", "shared", "skipped"])
def test_a_pass_inside_of_another_one_is_seen_by_hooks_alone(gradient: Any) -> None:
    """Whether autograd goes in the outer one, or not; a block of its own sees it."""
    outer, inner = classification(mlp(), (3,)), classification(mlp(), (3,))
    found: list[int] = []

    def observe(view: Any) -> None:
        if view.call.module in set(outer.model.modules()) and not found:
            found.append(len(_contexts()[-1].announced))
            with torch.enable_grad():
                loss = inner.loss()
            loss.register_hook(lambda _: found.append(len(_contexts()[-1].announced)))
            loss.backward(retain_graph=True)
            with backpack(BatchGrad()):
                loss.backward()

    with backpack(KFAC(), observer=observe, gradient=gradient, check="never"):
        outer.loss().backward()
    assert found == [1, 1, 1]  # the outer pass; in the inner one; in that of the inner block
    assert all(hasattr(parameter, "kfac") for parameter in outer.parameters)
    inner.compare("grad_batch", inner.expected(oracle.individual_gradients))
