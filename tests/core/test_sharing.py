"""Parameters and modules that take part more than once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from backpack_core import backpack, extend
from backpack_core.errors import UncoveredParameterWarning, UnsupportedError
from backpack_core.extensions import KFRA, BatchGrad, DiagGGNExact, DiagHessian, SumGradSquared
from tests import oracle
from tests.cases import Net, Problem, classification

EXTENSIONS = [BatchGrad, DiagGGNExact]


def test_module_called_twice() -> None:
    model = Net(
        lambda net, x: net.last(net.a(torch.tanh(net.a(x)))),
        a=nn.Linear(3, 3),
        last=nn.Linear(3, 3),
    )
    classification(model, (3,)).check()


@pytest.mark.parametrize("names", [["weight", "bias"], ["weight"], ["bias"]])
@pytest.mark.parametrize("kind", ["linear", "layer_norm", "weight_norm"])
def test_module_frozen_in_one_of_its_calls(kind: str, names: list[str]) -> None:
    """As a critic is for the actor's part of the loss."""

    def forward(net: Any, x: Tensor) -> Tensor:
        first = net.a(x)
        named = net.a.named_parameters()
        frozen = [p.requires_grad_(False) for name, p in named if any(n in name for n in names)]
        out: Tensor = net.last(first + net.a(torch.tanh(net.own(x))))
        for parameter in frozen:
            parameter.requires_grad_()
        return out

    a = nn.LayerNorm(3) if kind == "layer_norm" else nn.Linear(3, 3)
    a = weight_norm(a) if kind == "weight_norm" else a
    net = Net(forward, a=a, own=nn.Linear(3, 3), last=nn.Linear(3, 3))
    classification(net, (3,)).check(check="never")


def test_module_called_three_times_in_parallel() -> None:
    model = Net(
        lambda net, x: net.a(x) + net.a(2 * x) * net.act(net.a(x - 1)),
        a=nn.Linear(3, 3),
        act=nn.Sigmoid(),
    )
    classification(model, (3,)).check()


def test_activation_called_twice() -> None:
    model = Net(
        lambda net, x: net.b(net.act(net.a(net.act(1 * x)))),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 3),
        act=nn.ReLU(inplace=True),
    )
    classification(model, (3,)).check()


def tied() -> Net:
    model = Net(
        lambda net, x: net.b(net.act(net.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 3), act=nn.Tanh()
    )
    model.b.weight = model.a.weight
    return model


def test_two_modules_share_a_weight() -> None:
    problem = classification(tied(), (3,))
    assert len(problem.parameters) == 3
    problem.check()


def test_shared_parameter_with_several_extensions_of_one_kind() -> None:
    problem = classification(tied(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    problem.run(BatchGrad(), BatchGrad(savefield="again"), SumGradSquared(), DiagGGNExact())
    problem.compare("again", expected)
    problem.compare("grad_batch", expected)


def test_one_module_has_a_parameter_under_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x * self.a) * self.b

    classification_with_fallback(nn.Sequential(nn.Linear(3, 3), Twice()))


def classification_with_fallback(model: nn.Module) -> None:
    problem = classification(model, (3,))
    with pytest.warns(UserWarning, match="no layer rule"):
        problem.check()


def test_parent_shares_a_parameter_with_its_child() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(3, 3)
            self.weight = self.child.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.child(torch.sin(x @ self.weight))
            return result

    classification(nn.Sequential(nn.Linear(3, 3), Parent()), (3,)).check()


@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("position", ["before", "after"])
def test_parameter_of_a_module_and_of_a_bare_function(extension: Any, position: str) -> None:
    """For a quantity that cannot be had there, part of it would be missing: an error."""

    def forward(net: Any, x: Tensor) -> Tensor:
        if position == "before":
            return net.a(torch.tanh(F.linear(x, net.a.weight)))  # type: ignore[no-any-return]
        return F.linear(torch.tanh(net.a(x)), net.a.weight)

    problem = classification(Net(forward, a=nn.Linear(3, 3)), (3,))
    problem.check()
    with pytest.raises(UnsupportedError, match=r"\.weight' is also used|second derivative"):
        problem.run(extension(), DiagHessian())


def test_parameter_of_a_bare_function_only() -> None:
    model = Net(
        lambda net, x: net.a(F.linear(x, net.free)),
        a=nn.Linear(4, 3),
        free=nn.Parameter(torch.randn(4, 3)),
    )
    wrapper = Net(lambda net, x: net.a(F.linear(x, free)), a=model.a)
    free = model.free
    problem = classification(wrapper, (3,))
    with pytest.warns(UncoveredParameterWarning, match=r"shape \[4, 3\].*outside any extended"):
        problem.check()
    assert not hasattr(free, "grad_batch")
    assert free.grad is not None


def test_child_used_by_its_parameter() -> None:
    """The child is never called."""
    model = Net(
        lambda net, x: F.linear(net.a(x), net.b.weight), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    )
    problem = classification(model, (3,))
    model.b.bias.requires_grad_(False)  # not used
    problem.check()


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("outside_first", [True, False])
def test_intermediate_of_a_module_used_outside(outside_first: bool) -> None:
    """A path from the parameter to the loss that does not pass the module's output."""

    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = x * self.scale
            return torch.sin(self.hidden)

    def forward(net: Any, x: Tensor) -> Tensor:
        y, hidden = net.leaky(net.a(x)), net.leaky.hidden
        return hidden + y if outside_first else y + hidden  # type: ignore[no-any-return]

    leaky = Leaky()
    model = Net(forward, a=nn.Linear(3, 3), leaky=leaky)
    classification(model, (3,)).check()
    del leaky.hidden


def test_two_models_and_two_forward_passes_before_backward() -> None:
    problems = [classification(nn.Linear(3, 3), (3,)) for _ in range(2)]
    expected = [p.expected(oracle.individual_gradients) for p in problems]
    losses = [p.loss() for p in problems]
    for problem, loss, reference in zip(problems, losses, expected, strict=True):
        with backpack(BatchGrad()):
            loss.backward()
        problem.compare("grad_batch", reference)


def test_two_forward_passes_of_one_model_before_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    problems = [classification(model, (3,), batch) for batch in (2, 5)]
    losses = [p.loss() for p in problems]
    for problem, loss in zip(problems, losses, strict=True):
        gradients = problem.expected(oracle.individual_gradients)
        diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()
        problem.compare("grad_batch", gradients)
        problem.compare("diag_ggn_exact", diagonals)


def test_module_shared_by_two_models() -> None:
    stem = nn.Linear(3, 4)
    models = [nn.Sequential(stem, nn.Tanh(), nn.Linear(4, 3)) for _ in range(2)]
    for model in models:
        classification(model, (3,)).check()


def test_two_forward_passes_that_meet_before_the_loss() -> None:
    model = Net(lambda net, x, z: net.a(x) * net.a(z), a=nn.Linear(3, 3))
    problem = classification(model, (3,))
    problem.inputs = (*problem.inputs, torch.randn(3, 3))
    problem.check()


def test_two_forward_passes_that_meet_behind_the_losses() -> None:
    """Autograd is through with one before it begins the other: never half of the sum."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    parts = [classification(model, (3,)) for _ in range(2)]
    gradients = [p.expected(oracle.individual_gradients) for p in parts]
    diagonals = [p.expected(oracle.ggn_diagonals) for p in parts]
    loss = parts[0].loss() + parts[1].loss()
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    parts[0].compare("grad_batch", [a + b for a, b in zip(*gradients, strict=True)])
    sums = [(a + b).sum(0) for a, b in zip(*diagonals, strict=True)]
    parts[0].compare("diag_ggn_exact", sums)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_one_of_two_forward_passes_was_not_seen(extension: Any) -> None:
    """The engine is called past torch's own functions: what comes second was not known."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    parts = [classification(model, (3,)) for _ in range(2)]
    loss = parts[0].loss() + parts[1].loss()
    run: Any = torch.autograd.Variable._execution_engine.run_backward
    with (
        pytest.raises(UnsupportedError, match=r"Call backward\(\) inside the block on one tensor"),
        backpack(extension()),
    ):
        run((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def test_concatenated_outputs_of_two_forward_passes() -> None:
    """Sample n of the first pass and of the second are one sample of the sum."""
    model, lossfunc = nn.Linear(3, 3), nn.CrossEntropyLoss(reduction="sum")
    parts = [classification(model, (3,), reduction="sum") for _ in range(2)]
    expected = [p.expected(oracle.individual_gradients) for p in parts]
    extend(model), extend(lossfunc)
    output = torch.stack([model(p.inputs[0]) for p in parts], 2)
    loss = lossfunc(output, torch.stack([p.target for p in parts], 1))
    with backpack(BatchGrad()):
        loss.backward()
    parts[0].compare("grad_batch", [a + b for a, b in zip(*expected, strict=True)])


def test_two_losses_on_one_output() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y, z = torch.randn(4, 3), torch.randint(0, 3, (4,)), torch.randn(4, 3)
    problem = Problem(
        model, (x,), Net(lambda _, out, __: F.cross_entropy(out, y) + 0.5 * F.mse_loss(out, z)), y
    )
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    extend(model)
    cross_entropy, squares = extend(nn.CrossEntropyLoss()), extend(nn.MSELoss())
    output = model(x)
    with backpack(BatchGrad(), DiagGGNExact()):
        (cross_entropy(output, y) + 0.5 * squares(output, z)).backward()
    problem.compare("grad_batch", gradients)
    problem.compare("diag_ggn_exact", diagonals)


def test_one_loss_module_on_two_heads() -> None:
    model = Net(
        lambda net, x: [net.a(h := torch.tanh(net.stem(x))), net.b(h)],
        stem=nn.Linear(3, 4),
        a=nn.Linear(4, 3),
        b=nn.Linear(4, 3),
    )
    lossfunc = nn.MSELoss()
    x, y, z = torch.randn(3, 4, 3).unbind()
    plain = Problem(
        Net(lambda net, x: torch.cat(net.model(x), 1), model=model),
        (x,),
        Net(lambda _, out, __: F.mse_loss(out[:, :3], y) + F.mse_loss(out[:, 3:], z)),
        y,
    )
    diagonals = [d.sum(0) for d in plain.expected(oracle.ggn_diagonals)]
    extend(model), extend(lossfunc)
    a, b = model(x)
    with backpack(DiagGGNExact()):
        (lossfunc(a, y) + lossfunc(b, z)).backward()
    plain.compare("diag_ggn_exact", diagonals)


def test_extension_without_meaning_for_shared_parameters() -> None:
    with pytest.raises(UnsupportedError, match=r"is used 2 times, and .* has no meaning there"):
        classification(tied(), (3,)).run(KFRA())
