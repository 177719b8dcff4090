"""Retained graphs, pruned ones, and passes inside passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import Extension, backpack, extend
from backpack_core.errors import ReleasedIOError
from backpack_core.extensions import BatchGrad, DiagGGNExact, SumGradSquared
from tests import oracle
from tests.cases import Net, classification, mlp


def test_retain_graph() -> None:
    problem = classification(nn.Sequential(*mlp(), Net(lambda _, x: torch.sin(x))), (3,))
    loss = problem.loss()
    results = []
    for _ in range(2):
        with backpack(BatchGrad(), SumGradSquared(), DiagGGNExact()):
            loss.backward(retain_graph=True)
        results.append(problem.fields("grad_batch") + problem.fields("diag_ggn_exact"))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    with backpack(BatchGrad()):
        loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"), backpack(BatchGrad()):
        loss.backward()


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_inputs_are_freed_where_autograd_has_nothing_to_free() -> None:
    shift = nn.Parameter(torch.zeros(3))
    loss = extend(Net(lambda net, x: x + net.shift, shift=shift))(torch.randn(4, 3)).sum()
    with backpack(BatchGrad()):
        loss.backward()
    with pytest.raises(ReleasedIOError, match="retain_graph=True"), backpack(BatchGrad()):
        loss.backward()


def test_a_pass_inside_of_a_hook_may_retain_its_graph() -> None:
    """An implicit layer: the hook solves a linear system with products through one more step."""

    def forward(net: Any, x: Tensor) -> Tensor:
        def step(z: Tensor) -> Tensor:
            return torch.tanh(0.5 * net.inner(z) + net.outer(x))  # type: ignore[no-any-return]

        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(80):
                z = step(z)
        found, again = step(z), z.clone().requires_grad_()
        once_more = step(again)

        def solve(grad: Tensor) -> Tensor:
            total = grad
            for _ in range(80):
                total = grad + torch.autograd.grad(once_more, again, total, retain_graph=True)[0]
            return total

        if found.requires_grad:
            found.register_hook(solve)
        return found

    parts = [nn.Linear(3, 3) for _ in range(2)]
    parts[0].weight.data *= 0.5
    problem = classification(Net(forward, inner=parts[0], outer=parts[1]), (3,))
    expected = problem.expected(oracle.individual_gradients)
    problem.run(BatchGrad())
    problem.compare("grad_batch", expected)


def test_retained_graph_of_a_backward_pass_without_a_context() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss = problem.loss()
    loss.backward(retain_graph=True)
    with backpack(BatchGrad()):
        loss.backward()
    problem.compare("grad_batch", expected)


def test_only_some_inputs() -> None:
    problem = classification(nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(3, 3)), (3,))
    model = problem.model
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    loss = problem.loss()
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward(inputs=[model[2].weight])  # type: ignore[index]
    assert [hasattr(p, "grad_batch") for p in problem.parameters] == [False] * 2 + [True] * 4
    for position in range(2, 6):
        oracle.assert_close(problem.parameters[position].grad_batch, gradients[position])  # type: ignore[attr-defined]
        oracle.assert_close(problem.parameters[position].diag_ggn_exact, diagonals[position])  # type: ignore[attr-defined]
    assert [p.grad is not None for p in problem.parameters] == [False] * 2 + [True] + [False] * 3


@pytest.mark.parametrize("extension", [DiagGGNExact(), DiagGGNExact(chunk_size=1)], ids=repr)
@pytest.mark.parametrize("is_doubled", [False, True], ids=["module", "operation"])
@pytest.mark.parametrize("has_more", [False, True], ids=["alone", "and a weight behind it"])
def test_what_a_module_made_as_input(
    extension: Extension, is_doubled: bool, has_more: bool
) -> None:
    """Autograd stops there without running the node, unless it needs something behind it."""
    seen: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        seen[:] = [2 * net.a(x) if is_doubled else net.a(x)]
        return net.b(seen[0].tanh())  # type: ignore[no-any-return]

    problem = classification(Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3)), (3,))
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    for _ in range(5):  # also in passes that go by a plan
        loss = problem.loss()
        wanted = [*seen, *problem.parameters[: int(has_more)]]
        with backpack(BatchGrad(), extension):
            found = torch.autograd.grad(loss, wanted)
        assert [value.shape for value in found] == [value.shape for value in wanted]
        assert [hasattr(p, "grad_batch") for p in problem.parameters] == [has_more] * 2 + [True] * 2
        for position in range(0 if has_more else 2, 4):
            values = vars(problem.parameters[position])
            oracle.assert_close(values["grad_batch"], gradients[position])
            oracle.assert_close(values["diag_ggn_exact"], diagonals[position])


def test_some_inputs_leave_no_partial_sum_over_calls() -> None:
    """The first of two calls is never reached: half of the sum would be wrong."""
    model = Net(
        lambda net, x: net.c(net.a(torch.tanh(net.b(torch.tanh(net.a(x)))))),
        a=nn.Linear(3, 3),
        b=nn.Linear(3, 3),
        c=nn.Linear(3, 3),
    )
    problem = classification(model, (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss = problem.loss()
    with backpack(BatchGrad()):
        loss.backward(inputs=[model.b.weight])
    assert not hasattr(model.a.weight, "grad_batch")
    oracle.assert_close(model.b.weight.grad_batch, expected[2])


@pytest.mark.parametrize("is_added", [False, True], ids=["grad", "backward"])
def test_an_input_between_two_calls_leaves_no_partial_sum(is_added: bool) -> None:
    """``backward()`` runs the node of an input, ``torch.autograd.grad()`` does not."""
    seen: list[Tensor] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        seen[:] = [net.a(x)]
        return net.b(net.a(seen[0].tanh()))  # type: ignore[no-any-return]

    model = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    problem = classification(model, (3,))
    expected = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    loss = problem.loss()
    with backpack(BatchGrad(), DiagGGNExact()):
        if is_added:
            loss.backward(inputs=seen)
        else:
            torch.autograd.grad(loss, seen)
    assert hasattr(model.a.weight, "grad_batch") == is_added
    for position, parameter in enumerate(problem.parameters):
        if is_added or position >= 2:
            oracle.assert_close(vars(parameter)["grad_batch"], expected[position])
            oracle.assert_close(vars(parameter)["diag_ggn_exact"], diagonals[position])


class Stages(nn.Module):
    """Its first output does not depend on its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.child(x)
        return h, h * self.weight


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("by_grad", [False, True])
@pytest.mark.parametrize("extension", [BatchGrad, lambda: DiagGGNExact(chunk_size=1)])
def test_output_that_is_left_out(by_grad: bool, extension: Callable[[], Extension]) -> None:
    model = Net(lambda net, x: sum(net.stages(x)), stages=Stages())
    problem = classification(model, (3,))
    weight = model.stages.weight
    asked = extension()
    oracles = {
        "grad_batch": oracle.individual_gradients,
        "diag_ggn_exact": lambda *given: [d.sum(0) for d in oracle.ggn_diagonals(*given)],
    }
    names = [name for name, _ in problem.model.named_parameters()]
    expected = problem.expected(oracles[asked.savefield])[names.index("stages.weight")]
    loss = problem.loss()
    with backpack(asked):
        if by_grad:
            torch.autograd.grad(loss, [weight])
        else:
            loss.backward(inputs=[weight])
    oracle.assert_close(getattr(weight, asked.savefield), expected)


def test_autograd_grad_inside_the_context() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss = problem.loss()
    with backpack(BatchGrad()):
        grads = torch.autograd.grad(loss, problem.parameters)
    problem.compare("grad_batch", expected)
    for grad, individual in zip(grads, expected, strict=True):
        oracle.assert_close(grad, individual.sum(0))
    assert all(p.grad is None for p in problem.parameters)


def test_gradient_hook_inside_a_pass_may_run_another_pass() -> None:
    outer, inner = classification(mlp(), (3,)), classification(mlp(), (3,))
    expected = [p.expected(oracle.individual_gradients) for p in (outer, inner)]
    other = inner.loss()
    todo = [other]

    def nested(module: nn.Module) -> None:
        if todo:
            todo.pop().backward()

    loss = outer.loss()
    with backpack(BatchGrad(), extension_hook=nested):
        loss.backward()
    outer.compare("grad_batch", expected[0])
    inner.compare("grad_batch", expected[1])


def _with_table() -> Net:
    """What is sent to the table is kept apart by sample from before the pass begins."""

    def forward(net: Any, x: Tensor) -> Tensor:
        rows = net.table(torch.arange(4)) * 2
        out: Tensor = net.head(torch.tanh(net.first(x) + rows)).sum(1)
        return out

    parts = {"first": nn.Linear(3, 5), "table": nn.Embedding(4, 5), "head": nn.Linear(5, 3)}
    return Net(forward, **parts)


@pytest.mark.parametrize("wanted", ["table", "first"])
@pytest.mark.parametrize("check", ["never", "always"])
def test_a_pass_inside_by_the_same_graph_changes_nothing(wanted: str, check: Any) -> None:
    """A hook behind the head asks for gradients of something else: results stay those outside."""
    problem = classification(_with_table(), (4, 3))
    expected = problem.expected(oracle.individual_gradients)
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    out = model(*problem.inputs)
    loss, other = lossfunc(out, problem.target), out.square().sum()

    def ask(_: Tensor) -> None:
        torch.autograd.grad(other, model.get_parameter(f"{wanted}.weight"), retain_graph=True)

    handle = model.get_parameter("head.weight").register_hook(ask)
    with backpack(BatchGrad(), check=check):
        loss.backward(retain_graph=True)
    handle.remove()
    problem.compare("grad_batch", expected)


@pytest.mark.parametrize("check", ["first", "always", "never"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_inputs_that_a_loss_does_not_depend_on(check: Any, factor: float) -> None:
    """Autograd does not get to the nodes of such a loss, not even to the first."""
    models = [extend(nn.Linear(3, 3)) for _ in range(2)]
    lossfunc, x = extend(nn.MSELoss()), torch.randn(4, 3)
    for reached in ([], [1], [0, 1]):
        losses = [factor * lossfunc(models[n](x), x) for n in {0, *reached}]
        with backpack(BatchGrad(), check=check):
            torch.autograd.backward(losses, inputs=[models[1].weight])
        assert hasattr(models[1].weight, "grad_batch") == bool(reached)
        assert not hasattr(models[0].weight, "grad_batch")
