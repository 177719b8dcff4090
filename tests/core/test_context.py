"""The contexts: what they do, when, and what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import backpack, disable, extend
from backpack_core.engine.backward import BackwardPass
from backpack_core.errors import ReleasedIOError, UsageError
from backpack_core.extensions import BatchGrad, DiagGGNExact, SumGradSquared
from backpack_operations.order import calls_at
from backpack_products.tuning import memory_budget, set_memory_budget
from tests import oracle
from tests.cases import Net, Problem, classification, mlp


def test_hook_sees_every_module_after_all_extensions() -> None:
    problem = classification(mlp(), (3,))
    seen: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            assert p.grad_batch.shape == (3, *p.shape)  # type: ignore[attr-defined]
            assert p.sum_grad_squared.shape == p.diag_ggn_exact.shape == p.shape  # type: ignore[attr-defined]
            assert p.grad is None  # not accumulated yet
        seen.append(module)

    problem.run(BatchGrad(), SumGradSquared(), DiagGGNExact(), extension_hook=hook)
    model = problem.model
    assert seen == [problem.lossfunc, model[2], model[1], model[0]]  # type: ignore[index]


def test_hook_may_replace_what_was_stored() -> None:
    problem = classification(mlp(), (3,))
    expected = [g.sum(0) for g in problem.expected(oracle.individual_gradients)]

    def sum_up(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.total = p.grad_batch.sum(0)  # type: ignore[attr-defined]
            del p.grad_batch

    problem.run(BatchGrad(), extension_hook=sum_up)
    problem.compare("total", expected)
    assert not any(hasattr(p, "grad_batch") for p in problem.parameters)


def test_hook_without_extensions() -> None:
    problem = classification(mlp(), (3,))
    seen: list[str] = []
    problem.run(extension_hook=lambda module: seen.append(type(module).__name__))
    assert seen == ["CrossEntropyLoss", "Linear", "Tanh", "Linear"]


def test_hook_runs_for_modules_without_a_rule() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(3))
            self.child = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.child(x + self.shift)
            return result

    problem = classification(nn.Sequential(Shift()), (3,))
    seen: list[str] = []
    problem.run(BatchGrad(), extension_hook=lambda m: seen.append(type(m).__name__))
    # What a container has of its own is known when the pass is through.
    assert seen == ["CrossEntropyLoss", "Linear", "Shift"]


def test_nested_block_replaces_the_outer_one() -> None:
    problem = classification(mlp(), (3,))
    outer, inner = problem.loss(), problem.loss()
    with backpack(BatchGrad(savefield="of_outer")):
        with backpack(BatchGrad(savefield="of_inner")):
            inner.backward()
        assert not hasattr(problem.parameters[0], "of_outer")
        outer.backward()
    problem.compare("of_outer", problem.fields("of_inner"))


def test_block_can_be_used_again() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    block = backpack(BatchGrad())
    for _ in range(2):
        loss = problem.loss()
        with block:
            loss.backward()
        problem.compare("grad_batch", expected)
        for p in problem.parameters:
            del p.grad_batch


def test_block_ends_with_an_exception() -> None:
    problem = classification(mlp(), (3,))
    loss = problem.loss()
    with pytest.raises(KeyError), backpack(BatchGrad()):
        raise KeyError
    loss.backward()
    assert not hasattr(problem.parameters[0], "grad_batch")


def test_forward_inside_the_block() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    with backpack(BatchGrad()):
        problem.loss().backward()
    problem.compare("grad_batch", expected)


def test_several_backward_passes_in_one_block() -> None:
    problems = [classification(mlp(), (3,), batch) for batch in (2, 4)]
    expected = [p.expected(oracle.individual_gradients) for p in problems]
    with backpack(BatchGrad()):
        for problem in problems:
            problem.loss().backward()
    for problem, reference in zip(problems, expected, strict=True):
        problem.compare("grad_batch", reference)


def test_disable_forward_then_extended_forward() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    with disable(), disable():
        problem.loss().backward()
    problem.check()
    problem.compare("grad_batch", expected)


def test_no_context_frees_inputs_and_outputs() -> None:
    problem = classification(mlp(), (3,))
    loss = problem.loss()
    loss.backward()
    with pytest.raises((ReleasedIOError, RuntimeError)), backpack(BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("options", [{}, {"retain_graph": True}, {"gradient": "none"}])
def test_an_empty_block_does_what_no_block_does(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = classification(mlp(), (3,))
    problem.run(BatchGrad())
    expected = [p.grad for p in problem.parameters]
    monkeypatch.setattr(BackwardPass, "__init__", None)  # none is begun
    problem.run(**options)
    for parameter, gradient in zip(problem.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
        assert hasattr(parameter, "grad_batch")  # nothing was asked for


@pytest.mark.parametrize("keeps", [True, False])
def test_an_empty_block_frees_inputs_and_outputs(keeps: bool) -> None:
    problem = classification(mlp(), (3,))
    loss = problem.loss()
    with backpack(retain_graph=keeps):
        loss.backward()
    table: Any = loss.grad_fn
    assert [call.is_released for call in calls_at(table)] == [not keeps]


def test_an_empty_block_inside_of_another_one() -> None:
    problem = classification(mlp(), (3,))
    with backpack(BatchGrad()):
        with backpack():
            problem.loss().backward()
        assert not any(hasattr(p, "grad_batch") for p in problem.parameters)
        problem.loss().backward()
    assert all(hasattr(p, "grad_batch") for p in problem.parameters)


@pytest.mark.parametrize("name", ["extension_hook", "observer"])
def test_a_block_without_extensions_that_wants_to_see(name: str) -> None:
    problem, seen = classification(mlp(), (3,)), list[Any]()
    with backpack(**{name: seen.append}):  # type: ignore[arg-type]
        problem.loss().backward()
    assert len(seen) == 4


def test_one_extension_with_two_settings() -> None:
    problem = classification(mlp(), (3,))
    problem.run(BatchGrad(subsampling=[0]), BatchGrad(savefield="of_all"))
    for p in problem.parameters:
        assert torch.equal(p.grad_batch, p.of_all[:1])  # type: ignore[attr-defined]


def test_debug_logs_every_call(logged: list[str]) -> None:
    problem = classification(mlp(), (3,))
    problem.run(BatchGrad(), debug=True)
    lines = logged
    assert len(lines) == 4
    assert lines[1] == (
        "Linear '2': output [3, 3], rule LinearRule of backpack-plugin-layers "
        + lines[1].rsplit(" ", 1)[1]
    )


def test_quantity_is_started_and_pushed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extensions with equal propagators share it."""
    from backpack_layers.activation import TanhRule
    from backpack_layers.loss_classification import CrossEntropyLossRule

    counts = {"start": 0, "push": 0}

    def counted(rule: Any, name: str, key: str) -> None:
        original = getattr(rule, name)

        def method(*args: Any) -> Any:
            counts[key] += 1
            return original(*args)

        monkeypatch.setattr(rule, name, method)

    counted(CrossEntropyLossRule, "_sqrt_hessian", "start")
    counted(TanhRule, "_jac_t_mat_prod", "push")
    problem = classification(mlp(), (3,))
    again = [DiagGGNExact(savefield=name) for name in ("again", "third")]
    problem.run(DiagGGNExact(), *again, check="never")
    assert counts == {"start": 1, "push": 1}
    problem.run(DiagGGNExact(), DiagGGNExact([1], savefield="other"), check="never")
    assert counts == {"start": 3, "push": 3}


def test_unused_parameter_keeps_no_field() -> None:
    model = Net(lambda net, x: net.a(x), a=nn.Linear(3, 3), unused=nn.Linear(3, 3))
    problem = classification(model, (3,))
    problem.run(BatchGrad())
    assert hasattr(model.a.weight, "grad_batch")
    assert not hasattr(model.unused.weight, "grad_batch")


def test_backward_on_a_vector() -> None:
    """The loss without reduction, and a gradient handed to backward."""
    model, lossfunc = nn.Linear(3, 3), nn.CrossEntropyLoss(reduction="none")
    x, y, weights = torch.randn(4, 3), torch.randint(0, 3, (4,)), torch.rand(4)
    plain = Problem(model, (x,), Net(lambda _, out, t: weights @ lossfunc(out, t)), y)
    gradients = plain.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in plain.expected(oracle.ggn_diagonals)]
    extend(model), extend(lossfunc)
    losses = lossfunc(model(x), y)
    with backpack(BatchGrad(), DiagGGNExact()):
        losses.backward(weights)
    plain.compare("grad_batch", gradients)
    plain.compare("diag_ggn_exact", diagonals)


@pytest.mark.parametrize("size", [0, -1, "1GB", None])
def test_memory_budget(size: Any) -> None:
    before = memory_budget()
    with pytest.raises(UsageError, match="positive number of bytes"):
        set_memory_budget(size)
    assert memory_budget() == before


def test_star_imports_bring_what_there_is() -> None:
    found: dict[str, Any] = {}
    modules = "backpack_core", "backpack_core.extensions", "backpack_products"
    exec("\n".join(f"from {module} import *" for module in modules), found)
    assert {"backpack", "extend", "AffinePairsRule", "BatchGrad", "KFAC"} <= found.keys()
