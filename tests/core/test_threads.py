"""A context speaks for the thread that entered it, and for autograd's own threads on its behalf."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import backpack, disable
from backpack_core.engine.active import current, stacks
from backpack_core.errors import NotExtendedError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.testing.isolation import reset
from tests import oracle
from tests.cases import Problem, classification, mlp


def in_foreign_thread(function: Callable[[], Any]) -> None:
    """Run on a thread that Python's threading did not start, as autograd's device threads."""
    done = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(30)
    if errors:
        raise errors[0]


def in_python_thread(function: Callable[[], Any]) -> None:
    """Run on a thread of the user."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result(30)


@pytest.mark.host("autograd runs hooks of all passes on one thread of a GPU, so they cannot meet")
def test_two_threads_train_at_the_same_time() -> None:
    """Each its own model, extensions and hook; they meet inside every backward pass."""
    torch.manual_seed(0)
    problems = [classification(mlp(), (3,), batch) for batch in (3, 5)]
    settings: list[tuple[Any, str]] = [(BatchGrad, "grad_batch"), (DiagGGNExact, "diag_ggn_exact")]
    expected = [
        problems[0].expected(oracle.individual_gradients),
        [d.sum(0) for d in problems[1].expected(oracle.ggn_diagonals)],
    ]
    meet = threading.Barrier(2, timeout=30)
    rounds = 5

    def train(number: int) -> None:
        torch.set_default_dtype(torch.float64)
        problem, (extension, field) = problems[number], settings[number]
        for _ in range(rounds):
            loss = problem.loss()
            with backpack(extension(), extension_hook=lambda _: meet.wait()):
                meet.wait()
                loss.backward()
            problem.compare(field, expected[number])

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(train, number) for number in range(2)]:
            future.result(60)
    assert not any(hasattr(p, "diag_ggn_exact") for p in problems[0].parameters)
    assert not any(hasattr(p, "grad_batch") for p in problems[1].parameters)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_backward_on_a_device_thread(extension: Any) -> None:
    problem = classification(mlp(), (3,))
    quantity = oracle.individual_gradients if extension is BatchGrad else oracle.ggn_diagonals
    expected = problem.expected(quantity)
    loss = problem.loss()
    with backpack(extension()):
        in_foreign_thread(loss.backward)
    if extension is DiagGGNExact:
        expected = [d.sum(0) for d in expected]
    problem.compare(extension.savefield, expected)


def test_device_threads_of_two_training_threads() -> None:
    """The thread that ran the forward pass says whose context applies."""
    problems = [classification(mlp(), (3,)) for _ in range(2)]
    meet = threading.Barrier(2, timeout=30)

    def train(number: int) -> None:
        torch.set_default_dtype(torch.float64)
        loss = problems[number].loss()
        with backpack(BatchGrad(savefield=f"of_{number}")):
            meet.wait()
            in_foreign_thread(loss.backward)
            meet.wait()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(train, number) for number in range(2)]:
            future.result(60)
    for number, problem in enumerate(problems):
        for p in problem.parameters:
            assert hasattr(p, f"of_{number}")
            assert not hasattr(p, f"of_{1 - number}")


@pytest.mark.host("for a GPU, the thread of the forward pass counts")
def test_plain_backward_on_another_thread_does_not_see_the_context() -> None:
    problem = classification(mlp(), (3,))
    loss = problem.loss()
    with (
        pytest.raises(NotExtendedError, match="took part in a backward pass of this block"),
        backpack(BatchGrad()),
    ):
        in_python_thread(loss.backward)
    assert problem.parameters[0].grad is not None
    assert not hasattr(problem.parameters[0], "grad_batch")


@pytest.mark.host("for a GPU, the thread of the forward pass counts")
def test_context_and_backward_on_another_thread_than_forward() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss = problem.loss()

    def backward() -> None:
        with backpack(BatchGrad()):
            loss.backward()

    in_python_thread(backward)
    problem.compare("grad_batch", expected)


def test_device_thread_after_the_forward_thread_has_ended() -> None:
    problem = classification(mlp(), (3,))
    losses: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: losses.append(problem.loss()))
    thread.start()
    thread.join()
    with backpack(BatchGrad()):
        in_foreign_thread(losses[0].backward)
    assert hasattr(problem.parameters[0], "grad_batch")


def test_device_thread_with_the_number_of_an_ended_one() -> None:
    """Numbers of threads are given out again, here that of the forward thread to this one."""
    found: list[Any] = []
    with backpack(observer=print):
        in_foreign_thread(lambda: found.append(current(threading.get_ident())))
        assert found == [current(threading.get_ident())]
    assert found[0] is not None


@pytest.mark.host("for a GPU, the thread of the forward pass counts")
def test_foreign_thread_with_a_context_of_its_own() -> None:
    problem: Problem = classification(mlp(), (3,))
    loss = problem.loss()

    def backward() -> None:
        with backpack(BatchGrad(savefield="inner_field")):
            loss.backward()

    with backpack():
        in_foreign_thread(backward)
    assert hasattr(problem.parameters[0], "inner_field")


def test_a_context_that_another_thread_leaves() -> None:
    """As where a generator that is suspended inside a block is closed by another thread."""
    problem = classification(mlp(), (3,))
    block = backpack(BatchGrad())

    def enter() -> None:
        block.__enter__()
        problem.loss().backward()

    in_python_thread(enter)
    assert len(stacks) == 1
    block.__exit__(None, None, None)
    assert not stacks


def test_disable_is_a_matter_of_one_thread() -> None:
    problem = classification(mlp(), (3,))
    with disable():
        in_python_thread(lambda: problem.run(BatchGrad()))
    assert hasattr(problem.parameters[0], "grad_batch")


def test_exception_on_a_device_thread() -> None:
    problem = classification(mlp(), (3,))
    loss = problem.loss()

    def fail(module: nn.Module) -> None:
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"), backpack(extension_hook=fail):
        in_foreign_thread(loss.backward)
    assert not stacks
    assert current(threading.get_ident()) is None
    problem.check()


def test_first_use_in_two_threads_at_once() -> None:
    """Plugins are loaded once, and nobody goes on with half of them."""
    from backpack_core import plugins
    from backpack_core.plugins.registry import registry

    reset()
    meet = threading.Barrier(2, timeout=30)

    def look() -> bool:
        meet.wait()
        plugins.ensure_loaded()
        return registry.resolve(nn.CrossEntropyLoss()).is_fallback

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(look) for _ in range(2)]
        assert [f.result(30) for f in futures] == [False, False]
