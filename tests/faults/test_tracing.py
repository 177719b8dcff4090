"""Extended models that are traced, scripted, exported, or run on tensors of a special kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from backpack_core import backpack, extend, unextend
from backpack_core.errors import BackpackError, UsageError
from backpack_core.extensions import (
    EKFAC,
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchDotGrad,
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    DiagHMP,
    GGNGram,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from tests import oracle
from tests.cases import Net, classification
from tests.faults.refusal import right_or_refused
from tests.versions import is_older

EXTENSIONS: list[Callable[[], Any]] = [
    BatchGrad, BatchL2Grad, BatchDotGrad, SumGradSquared, Variance, lambda: ClippedSumGrad(1.0),
    DiagGGNExact, DiagGGNMC, BatchDiagGGNExact, BatchDiagGGNMC, SqrtGGNExact, SqrtGGNMC, KFAC,
    KFLR, KFRA, EKFAC, GGNGram, GGNMP, HMP, PCHMP, DiagHMP, DiagHessian, BatchDiagHessian,
]  # fmt: skip
NAMES = [type(make()).__name__ for make in EXTENSIONS]
LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "ce": (nn.CrossEntropyLoss, lambda: torch.zeros(5, dtype=torch.long)),
    "ce-weight": (
        lambda: nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0])),
        lambda: torch.zeros(5, dtype=torch.long),
    ),
    "mse": (nn.MSELoss, lambda: torch.zeros(5, 3)),
    "bce": (nn.BCEWithLogitsLoss, lambda: torch.zeros(5, 3)),
}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3))


def _scripted(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.script(model)


def _exported(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,), strict=True).module()


def _exported_freely(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,), strict=False).module()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(_scripted, id="script"),
        pytest.param(torch.jit.trace, id="trace"),
        pytest.param(
            _exported,
            id="export",
            marks=pytest.mark.skipif(
                is_older("2.7"),
                reason="torch 2.6 exports no model with a hook on its output with strict=True",
            ),
        ),
        pytest.param(_exported_freely, id="export-free"),
    ],
)
def test_transformed_models(transform: Any) -> None:
    """It works, or one sentence names what to do; the model itself stays as it was."""
    problem = classification(_model(), (3,))
    x = problem.inputs[0]
    model = extend(problem.model)
    expected = unextend(copy.deepcopy(model))(x)
    with right_or_refused("unextend", error=BackpackError):
        oracle.assert_close(transform(model, x)(x), expected)
    oracle.assert_close(transform(unextend(copy.deepcopy(model)), x)(x), expected)
    problem.check()


def test_hooks_that_were_copied_to_another_module() -> None:
    """As quantisation does when it replaces layers, without saying that hooks take keywords."""
    layer, other, x = extend(nn.Linear(3, 4)), nn.Linear(3, 4), torch.randn(5, 3)
    for before in layer._forward_pre_hooks.values():
        other.register_forward_pre_hook(before)
    for after in layer._forward_hooks.values():
        other.register_forward_hook(after)
    assert layer._forward_pre_hooks
    assert torch.equal(other(x), nn.functional.linear(x, other.weight, other.bias))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("make", [nn.Tanh, lambda: nn.Linear(3, 3)], ids=["tanh", "linear"])
def test_a_traced_part(make: Callable[[], nn.Module]) -> None:
    """It is a module like any other, without a rule; parameters of its own may be refused."""
    part = make()
    problem = classification(nn.Sequential(nn.Linear(3, 3), part, nn.Linear(3, 3)), (3,))
    gradients = problem.expected(oracle.individual_gradients)
    problem.model[1] = torch.jit.trace(part, torch.randn(3, 3))  # type: ignore[operator]
    with right_or_refused("TracedModule", may_refuse=make is not nn.Tanh):
        problem.run(BatchGrad())
        problem.compare("grad_batch", gradients)


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_a_scripted_part_with_parameters() -> None:
    """What its one node keeps for its own backward pass are outputs that nobody uses."""
    problem = classification(nn.Sequential(nn.Linear(3, 3), _Own(), nn.Linear(3, 3)), (3,))
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.model[1] = torch.jit.script(problem.model[1])  # type: ignore[index, operator]
    for _ in range(3):  # it is compiled on the way
        problem.run(BatchGrad(), DiagGGNExact())
        problem.compare("grad_batch", gradients)
        problem.compare("diag_ggn_exact", diagonals)


def _numbers(value: Any, p: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "order"):
        return value.dense()  # type: ignore[no-any-return]
    if hasattr(value, "gram"):
        return value.gram  # type: ignore[no-any-return]
    return value(torch.zeros(2, *p.shape, device=p.device))  # type: ignore[no-any-return]


def _shapes(make: Callable[[], Any], loss: str) -> list[torch.Size]:
    """Those of the results, for tensors as they are made at present."""
    model, lossfunc = extend(_model()), extend(LOSSES[loss][0]())
    value = lossfunc(model(torch.randn(5, 3)), LOSSES[loss][1]())
    with backpack(extension := make()):
        value.backward()
    found = [(getattr(p, extension.savefield), p) for p in model.parameters()]
    return [_numbers(*pair).shape for pair in found]


@pytest.mark.grid(4)
@pytest.mark.parametrize("make", EXTENSIONS, ids=NAMES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_values(kind: str, loss: str, make: Callable[[], Any]) -> None:
    """Shapes are those of numbers: enough to plan memory with."""
    expected = _shapes(make, loss)
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        assert _shapes(make, loss) == expected


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_moved_rows_of_tensors_without_values(kind: str) -> None:
    """Whose they are is not known, and needs no number."""

    class Steps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(x.unbind(1))

    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        model = extend(nn.Sequential(nn.Linear(2, 4), Steps(), nn.Linear(4, 3)))
        lossfunc, y = extend(nn.CrossEntropyLoss()), torch.zeros(6, dtype=torch.long)
        with backpack(BatchGrad(), DiagGGNExact()):
            lossfunc(model(torch.randn(3, 2, 2)), y).backward()
    assert model[0].weight.grad_batch.shape == (3, 4, 2)
    assert model[2].weight.diag_ggn_exact.shape == (3, 4)


def test_a_module_without_a_rule_on_tensors_without_values() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x + self.shift)

    with torch.device("meta"):
        model = extend(nn.Sequential(nn.Linear(3, 4), Shift(), nn.Linear(4, 3)))
        lossfunc = extend(nn.MSELoss())
        loss = lossfunc(model(torch.randn(5, 3)), torch.zeros(5, 3))
        with (
            pytest.warns(UserWarning, match="no layer rule"),
            backpack(BatchGrad(), DiagGGNExact()),
        ):
            loss.backward()
    assert model[1].shift.grad_batch.shape == (5, 4)
    assert model[1].shift.diag_ggn_exact.shape == (4,)


# Tensors that were made in inference mode


def _made_in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("where", ["input", "target", "both"])
@pytest.mark.parametrize("make", [BatchGrad, DiagGGNExact, DiagHessian], ids=lambda m: m.__name__)
def test_data_of_inference_mode(make: Any, where: str) -> None:
    problem = classification(nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(),
                                           nn.Linear(4, 3)), (1, 3))  # fmt: skip
    problem.run(make())
    expected = problem.fields(make().savefield)
    if where != "target":
        # Autograd saves the input of a layer with a weight, so the first one has none to train.
        problem.inputs = (_made_in_inference_mode(problem.inputs[0]),)
        problem.model[0].requires_grad_(False)  # type: ignore[index]
        expected = expected[2:]
    if where != "input":
        problem.target = _made_in_inference_mode(problem.target)
    # What autograd itself says of such tensors.
    words = "Inference tensors cannot be saved for backward"
    with right_or_refused(words, error=RuntimeError, may_refuse=where != "input"):
        problem.run(make())
        problem.compare(make().savefield, expected)


def test_a_constant_of_inference_mode() -> None:
    constant = _made_in_inference_mode(torch.randn(4))
    model = Net(lambda net, x: net.b(net.skip(net.a(x)) + constant), a=nn.Linear(3, 4),
                skip=nn.Identity(), b=nn.Linear(4, 3))  # fmt: skip
    classification(model, (3,), 4).check()


def test_a_forward_pass_in_inference_mode() -> None:
    """Nothing is recorded, and the next pass is as usual."""
    problem = classification(_model(), (3,))
    extend(problem.model)
    with torch.inference_mode():
        problem.model(*problem.inputs)
    problem.check()


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, DiagHessian])
def test_a_backward_pass_in_inference_mode(extension: Any) -> None:
    problem = classification(_model(), (3,))
    loss = problem.loss()
    with (
        pytest.raises(UsageError, match="Leave inference_mode"),
        torch.inference_mode(),
        backpack(extension()),
    ):
        loss.backward()
    problem.run(extension())
