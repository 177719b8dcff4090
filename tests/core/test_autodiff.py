"""Modules without a layer rule: exact by replay, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack
from backpack_core.errors import AutodiffFallbackWarning, UnsupportedError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Net, classification

fallback_is_expected = pytest.mark.filterwarnings(
    "ignore::backpack_core.errors.AutodiffFallbackWarning"
)


class ClassToken(nn.Module):
    """Prepends a learned token, and runs a child."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x[:, None]], 1)
        return torch.tanh(self.child(tokens)).mean(1)


class Scaled(nn.Module):
    """A learned scale around another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x * self.scale)


class Keyword(nn.Module):
    """Arguments by keyword, of which one has no batch axis and one is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, *, mask: Tensor, power: int) -> Tensor:
        return torch.sin(x @ (self.w * mask)) ** power


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.randn(4))
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x * self.w * self.fixed)


class Stateful(nn.Module):
    """Stores what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * self.w
        return torch.sin(self.last)


class OneValue(nn.Module):
    """A parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x / self.temperature)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "class_token": ClassToken,
    "scaled": lambda: Scaled(nn.Linear(4, 4)),
    "nested": lambda: Scaled(nn.Sequential(Scaled(nn.Tanh()), ClassToken(), nn.ReLU())),
    "with_buffer": WithBuffer,
    "stateful": Stateful,
    "one_value": OneValue,
    "keyword": lambda: Net(
        lambda net, x: net.k(mask=torch.ones(4, 4).tril(), x=x, power=2), k=Keyword()
    ),
}


@fallback_is_expected
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODULES)
def test_module_with_parameters_of_its_own(name: str, batch: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), MODULES[name](), nn.Linear(4, 3))
    classification(model, (3,), batch).check()


@fallback_is_expected
def test_nothing_of_the_replay_stays_on_the_module() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 4), Stateful(), nn.Linear(4, 3)), (3,))
    loss = problem.loss()
    last = problem.model[1].last  # type: ignore[index, union-attr]
    with backpack(BatchGrad()):
        loss.backward()
    assert problem.model[1].last is last  # type: ignore[index, union-attr]


@fallback_is_expected
def test_frozen_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Scaled(nn.Linear(4, 4)), nn.Linear(4, 3))
    model[1].scale.requires_grad_(False)
    classification(model, (3,)).check()


def test_warning_names_the_module_and_comes_once() -> None:
    model = nn.Sequential(nn.Linear(3, 4), WithBuffer(), WithBuffer(), nn.Linear(4, 3))
    problem = classification(model, (3,))
    with pytest.warns(AutodiffFallbackWarning) as caught:
        problem.run(BatchGrad(), DiagGGNExact())
    (warning,) = caught
    text = str(warning.message)
    assert "WithBuffer '2' has no layer rule: the parameters of test_autodiff.WithBuffer" in text
    assert "write a layer rule" in text
    problem.run(BatchGrad())


def test_module_without_parameters_needs_no_rule_and_no_warning() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), Net(lambda _, x: torch.sin(x) * x), Net(lambda _, x: x), nn.Linear(4, 3)
    )
    classification(model, (3,)).check()


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w + torch.randn_like(x)


class Branching(Noise):
    """Chooses by the whole batch: samples are not independent."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w if x.sum() > 1e3 else x * self.w ** len(x)


class BranchingBySample(Noise):
    """Chooses by each sample, which vmap cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * self.w if row.sum() > 0 else row * self.w**2 for row in x])


class Counting(BranchingBySample):
    """Counts its calls in a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


@fallback_is_expected
@pytest.mark.parametrize("make", [BranchingBySample, lambda: nn.GRUCell(4, 4)])
def test_module_that_vmap_cannot_trace(make: Callable[[], nn.Module]) -> None:
    classification(nn.Sequential(nn.Linear(3, 4), make(), nn.Linear(4, 3)), (3,)).check()


@fallback_is_expected
def test_replay_leaves_buffers_alone() -> None:
    counting = Counting()
    problem = classification(nn.Sequential(nn.Linear(3, 4), counting, nn.Linear(4, 3)), (3,))
    problem.run(BatchGrad())
    assert counting.calls == 1
    total = counting.w.grad_batch.sum(0)  # type: ignore[attr-defined]
    assert torch.allclose(total, counting.w.grad)  # type: ignore[arg-type]


class InnerDropout(Noise):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.w, 0.5)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Noise, "draws random numbers"),
        (InnerDropout, "draws random numbers"),
        (Branching, "its samples influence each other"),
    ],
)
def test_module_that_cannot_be_replayed(kind: Any, reason: str) -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 4), kind(), nn.Linear(4, 3)), (3,))
    with (
        pytest.warns(AutodiffFallbackWarning),
        pytest.raises(UnsupportedError) as error,
    ):
        problem.run(BatchGrad())
    text = str(error.value)
    assert f"{kind.__name__} '1' has no layer rule" in text
    assert reason in text
    assert "write a layer rule" in text.lower()


class Centred(Noise):
    """Mixes samples."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.w


class Gram(Noise):
    """Gets a matrix with as many rows as there are samples."""

    def forward(self, x: Tensor, constant: Tensor | None = None) -> Tensor:
        assert constant is not None
        return x * self.w + constant.sum(0)


@pytest.mark.parametrize("name", ["centred", "gram"])
def test_replay_that_gives_something_else(name: str) -> None:
    layers = {
        "centred": Centred(),
        "gram": Net(lambda net, x: net.gram(x, constant=torch.ones(3, 4)), gram=Gram()),
    }
    problem = classification(nn.Sequential(nn.Linear(3, 4), layers[name], nn.Linear(4, 3)), (3,))
    with (
        pytest.warns(AutodiffFallbackWarning),
        pytest.raises(UnsupportedError, match="gives other values"),
    ):
        problem.run(BatchGrad())


@fallback_is_expected
def test_parameter_changed_before_backward() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 4), WithBuffer(), nn.Linear(4, 3)), (3,))
    loss = problem.loss()
    with torch.no_grad():
        problem.model[1].w.mul_(2)  # type: ignore[index, union-attr]
    with pytest.raises((UnsupportedError, RuntimeError)), backpack(BatchGrad()):
        loss.backward()


@fallback_is_expected
def test_differentiable_replay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), WithBuffer(), nn.Linear(4, 3))
    problem = classification(model, (3,), reduction="sum")
    parameter = model[1].w
    x, y = problem.inputs[0], problem.target

    def squares(w: Tensor) -> Tensor:
        total = torch.zeros(())
        for n in range(3):
            names = {"1.w": w}
            out = torch.func.functional_call(model, names, x[n : n + 1])
            (g,) = torch.autograd.grad(F.cross_entropy(out, y[n : n + 1]), w, create_graph=True)
            total = total + g.pow(2).sum()
        return total

    w = parameter.detach().requires_grad_()
    (expected,) = torch.autograd.grad(squares(w), w)
    loss = problem.loss()
    with backpack(BatchGrad()):
        torch.autograd.grad(loss, problem.parameters, create_graph=True)
    (found,) = torch.autograd.grad(parameter.grad_batch.pow(2).sum(), parameter)
    oracle.assert_close(found, expected)
    for p in problem.parameters:
        del p.grad_batch
