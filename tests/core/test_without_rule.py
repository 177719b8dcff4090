"""Modules without a layer rule: their parameters are looked at where operations use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import View, backpack, extend
from backpack_core.errors import (
    AutodiffFallbackWarning,
    MissingPluginError,
    SampleMixingError,
    UnsupportedError,
)
from backpack_core.extensions import (
    KFLR,
    BatchGrad,
    DiagGGNExact,
)
from backpack_core.testing import temporary_plugin
from backpack_products import ParametricRule
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
    assert (
        "WithBuffer '2' has no layer rule: the parameters of test_without_rule.WithBuffer" in text
    )
    assert "write a layer rule" in text
    problem.run(BatchGrad())


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


class ScaleOnly(ParametricRule):
    module_types = (Offset,)
    params = ("weight",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.parameter("weight")

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return mat * view.input


def test_a_rule_that_leaves_a_parameter_out_is_named() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 4), Offset(), nn.Linear(4, 3)), (3,))
    said = r"Offset '1' has the layer rule ScaleOnly, whose params leave out 'shift': .* Add it to"
    with temporary_plugin(ScaleOnly):
        with pytest.warns(AutodiffFallbackWarning, match=said):
            problem.check()
        with pytest.raises(MissingPluginError, match="Add it to the params of ScaleOnly"):
            problem.run(BatchGrad(fail_mode="error"))


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
def test_a_forward_pass_runs_once() -> None:
    counting = Counting()
    problem = classification(nn.Sequential(nn.Linear(3, 4), counting, nn.Linear(4, 3)), (3,))
    problem.run(BatchGrad())
    assert counting.calls == 1
    total = counting.w.grad_batch.sum(0)  # type: ignore[attr-defined]
    assert torch.allclose(total, counting.w.grad)  # type: ignore[arg-type]


class InnerDropout(Noise):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.w, 0.5)


@fallback_is_expected
@pytest.mark.parametrize("kind", [Noise, InnerDropout, Branching])
def test_what_another_forward_pass_would_not_give_again(kind: Any) -> None:
    """Random numbers, and what is chosen by the batch."""
    model = nn.Sequential(nn.Linear(3, 4), kind(), nn.Linear(4, 3))
    problem = classification(model, (3,))
    problem.whole = True
    problem.check()


class Centred(Noise):
    """Mixes samples."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.w


class CentredBehind(Noise):
    """Mixes samples of what its parameter gives."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.w
        return y - y.mean(0)


@fallback_is_expected
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("kind", [Centred, CentredBehind])
def test_module_that_mixes_samples(kind: Any, extension: Any) -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 4), kind(), nn.Linear(4, 3)), (3,))
    with pytest.raises(SampleMixingError, match=kind.__name__):
        problem.run(extension())


class Gram(Noise):
    """Gets a matrix with as many rows as there are samples."""

    def forward(self, x: Tensor, constant: Tensor | None = None) -> Tensor:
        assert constant is not None
        return x * self.w + constant.sum(0)


@fallback_is_expected
def test_constant_as_long_as_the_batch() -> None:
    layer = Net(lambda net, x: net.gram(x, constant=torch.ones(3, 4)), gram=Gram())
    classification(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 3)), (3,)).check()


@fallback_is_expected
@pytest.mark.parametrize("computed", [False, True])
def test_parameters_that_functional_call_gives(computed: bool) -> None:
    """They need not be leaves, nor parameters."""
    model = extend(nn.Sequential(nn.Linear(3, 4), WithBuffer(), nn.Linear(4, 3)))
    x, theta = torch.randn(5, 3), torch.randn(4, requires_grad=True)
    w = torch.sin(theta) if computed else theta
    with backpack(BatchGrad()):
        torch.func.functional_call(model, {"1.w": w}, x).sum().backward()
    for n in range(5):
        other = w.detach().requires_grad_()
        torch.func.functional_call(model, {"1.w": other}, x[n : n + 1]).sum().backward()
        oracle.assert_close(w.grad_batch[n], other.grad)  # type: ignore[attr-defined]


@fallback_is_expected
def test_a_hook_sees_all_results_of_a_module_at_once() -> None:
    model = nn.Sequential(nn.Linear(3, 4), OwnLinear(), nn.Linear(4, 3))
    seen = []

    def hook(module: nn.Module) -> None:
        seen.append(module)
        assert all(hasattr(p, "grad_batch") for p in module.parameters(recurse=False))

    classification(model, (3,)).run(BatchGrad(), extension_hook=hook)
    assert seen.count(model[1]) == 1


class OwnLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


@fallback_is_expected
def test_factors_of_a_layer_of_ones_own() -> None:
    """What operations do tells the form: they are those of the same layer with a rule."""
    found = []
    for layer in (OwnLinear(), nn.Linear(4, 4)):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
        )
        layer.load_state_dict(model[2].state_dict())
        model[2] = layer
        problem = classification(model, (3,))
        problem.run(KFLR())
        found.append([problem.model[2].weight.kflr, problem.model[2].bias.kflr])
    for ours, reference in zip(*found, strict=True):
        for factor, expected in zip(ours, reference, strict=True):
            oracle.assert_close(factor, expected)


@fallback_is_expected
def test_parameter_changed_before_backward() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 4), WithBuffer(), nn.Linear(4, 3)), (3,))
    loss = problem.loss()
    with torch.no_grad():
        problem.model[1].w.mul_(2)  # type: ignore[index, union-attr]
    with pytest.raises((UnsupportedError, RuntimeError)), backpack(BatchGrad()):
        loss.backward()


@fallback_is_expected
def test_differentiable() -> None:
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
