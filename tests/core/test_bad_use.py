"""What makes no sense is refused, with what was asked, what was found, and what to do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import backpack_core
from backpack_core import backpack, disable, extend, prefer, quantities
from backpack_core.errors import (
    BackpackError,
    BackpackWarning,
    MissingPluginError,
    NotAnExtensionError,
    NotExtendedError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from backpack_core.extensions import KFAC, BatchGrad, BatchL2Grad, DiagGGNExact, DiagGGNMC
from backpack_products import FirstOrderExtension, SampleProduct
from backpack_products.operations import dense
from backpack_products.tuning import memory_budget, set_memory_budget
from tests.cases import Problem, classification


class Shift(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + self.shift)


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


# What backpack(...) takes.


def test_class_instead_of_instance() -> None:
    with pytest.raises(NotAnExtensionError, match=r"Got the class BatchGrad: write BatchGrad\(\)"):
        backpack(BatchGrad)  # type: ignore[arg-type]


def test_tools_may_ask_the_core_for_the_name_of_an_extension() -> None:
    assert not hasattr(backpack_core, "KFAC")


@pytest.mark.parametrize("wrong", ["BatchGrad", 1, None, nn.Linear(1, 1), int])
def test_no_extension(wrong: Any) -> None:
    with pytest.raises(NotAnExtensionError, match=r"instances of backpack_core\.Extension"):
        backpack(wrong)
    with pytest.raises(TypeError):
        backpack(wrong)


def test_extensions_in_a_list_and_a_sample_without_a_batch() -> None:
    with pytest.raises(NotAnExtensionError, match=r"Write backpack\(\*extensions\)"):
        backpack([BatchGrad()])  # type: ignore[arg-type]
    model, lossfunc = extend(nn.Linear(3, 1)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.randn(3)), torch.zeros(1))
    with pytest.raises(ShapeError, match=r"A single sample needs an axis"), backpack(BatchGrad()):
        loss.backward()


def test_two_extensions_with_one_savefield() -> None:
    with pytest.raises(UsageError, match=r"^BatchGrad and Copy both save under 'grad_batch': give"):
        backpack(BatchGrad(), type("Copy", (BatchGrad,), {})())
    backpack(BatchGrad(), BatchGrad(savefield="other"))


@pytest.mark.parametrize("savefield", ["grad", "data", "shape", "outer"])
def test_savefield_of_torch(savefield: str) -> None:
    with pytest.raises(UsageError, match=rf"would hide torch\.Tensor\.{savefield}"):
        BatchGrad(savefield=savefield)


@pytest.mark.parametrize("savefield", ["two words", "1", "a.b", 3])
def test_savefield_that_is_no_name(savefield: Any) -> None:
    with pytest.raises(UsageError, match="identifier"):
        BatchGrad(savefield=savefield)


def test_extension_without_savefield() -> None:
    class Nameless(FirstOrderExtension):
        def read(self, product: SampleProduct) -> Tensor:
            return dense(product)

    with pytest.raises(UsageError, match="Nameless needs a savefield"):
        Nameless()


@pytest.mark.parametrize("hook", [1, "print", nn.Linear])
def test_hook_that_cannot_be_called(hook: Any) -> None:
    if callable(hook):
        backpack(BatchGrad(), extension_hook=hook)
        return
    with pytest.raises(UsageError, match=r"extension_hook must be callable\. Got"):
        backpack(BatchGrad(), extension_hook=hook)
    with pytest.raises(UsageError, match=r"observer must be callable\. Got"):
        backpack(BatchGrad(), observer=hook)


@pytest.mark.parametrize("beside", [1, torch.ones(()), torch.ones(2)])
def test_terms_that_are_no_list(beside: Any) -> None:
    with pytest.raises(UsageError, match=r"beside=\[term\]"):
        backpack(BatchGrad(), beside=beside)


@pytest.mark.parametrize("wrong", [nn.Linear, [nn.Linear(1, 1)], torch.zeros(100), F.relu])
def test_what_is_no_module(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"torch\.nn\.Module\. Got") as error:
        extend(wrong)
    assert len(message(error)) < 200


def test_a_loss_that_is_a_function_is_not_extended() -> None:
    with pytest.raises(UsageError, match=r"A function cannot be extended: .* module of torch\.nn"):
        extend(F.cross_entropy)  # type: ignore[type-var]


def test_unknown_fail_mode() -> None:
    with pytest.raises(UsageError, match=r"fail_mode must be one of .*'autodiff'.* Got 'loud'"):
        BatchGrad(fail_mode="loud")  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [0, -1, 1.5, "many", True])
def test_number_of_monte_carlo_samples(samples: Any) -> None:
    with pytest.raises(UsageError, match=r"mc_samples must be a positive integer"):
        DiagGGNMC(mc_samples=samples)


def test_an_extension_that_is_given_a_model() -> None:
    """An optimizer has the same name, and takes one."""
    with pytest.raises(UsageError, match="the optimizers are in backpack_optimizers"):
        KFAC(nn.Linear(2, 1))  # type: ignore[arg-type]


class Four:
    """An integer as numpy's are: no ``int``."""

    def __index__(self) -> int:
        return 4


@pytest.mark.parametrize("four", [Four(), torch.tensor(4)])
def test_integers_of_others(four: Any) -> None:
    extension = DiagGGNMC(mc_samples=four)
    assert extension.get_num_mc_samples() == 4
    assert extension.propagator == DiagGGNMC(4).propagator
    assert DiagGGNExact(chunk_size=four).chunk_size == 4


@pytest.mark.parametrize("wrong", [nn.Linear, F.relu, [nn.Linear(1, 1)]])
def test_quantities_of_what_is_no_module(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"quantities\(model\) takes a torch\.nn\.Module\. Got"):
        quantities(wrong)


def test_quantities_of_a_parameter_that_is_not_there() -> None:
    for name in ("wieght", 0, None):
        with pytest.raises(KeyError, match="No trained parameter is named"):
            quantities(nn.Linear(1, 1))[name]  # type: ignore[index]


@pytest.mark.parametrize("size", [0, -1, None, "64", True, math.nan])
def test_memory_budgets_that_are_none(size: Any) -> None:
    with pytest.raises(UsageError, match="a positive number of bytes"):
        set_memory_budget(size)


def test_memory_budgets_of_numpy() -> None:
    before = memory_budget()
    set_memory_budget(np.int64(2**20))  # type: ignore[arg-type]
    assert memory_budget() == 2**20
    set_memory_budget(before)


@pytest.mark.parametrize("given", [(None,), (nn.Linear,), ("plugin", 3), ("plugin", nn.ReLU())])
def test_what_cannot_be_preferred(given: Any) -> None:
    with pytest.raises(UsageError, match=r"prefer\(\.\.\.\) takes the name of a distribution"):
        prefer(*given)


def test_inside_disable() -> None:
    with (
        disable(),
        pytest.raises(UsageError, match=r"inside disable\(\).*Leave the disable"),
        backpack(BatchGrad()),
    ):
        pass


# Something was not extended.


def test_nothing_was_extended() -> None:
    model = nn.Linear(3, 3)
    with (
        pytest.raises(NotExtendedError, match=r"BatchGrad\) computed nothing.*extend\(model\)"),
        backpack(BatchGrad()),
    ):
        F.mse_loss(model(torch.randn(2, 3)), torch.randn(2, 3)).backward()


def test_backward_was_not_called() -> None:
    with (
        pytest.raises(NotExtendedError, match=r"loss\.backward\(\) inside the block"),
        backpack(BatchGrad()),
    ):
        pass
    with backpack():
        pass


def test_a_block_inside_of_the_block() -> None:
    model, x = extend(nn.Linear(3, 3)), torch.randn(2, 3)
    with (
        pytest.raises(NotExtendedError, match=r"BatchGrad.*the innermost, if blocks are nested"),
        backpack(BatchGrad()),
        backpack(BatchL2Grad()),
    ):
        model(x).sum().backward()
    assert hasattr(model.weight, "batch_l2")


@pytest.mark.parametrize("without", [torch.no_grad, disable])
def test_forward_was_not_recorded(without: Any) -> None:
    model = extend(nn.Linear(3, 3))
    x = torch.randn(2, 3, requires_grad=True)
    with without():
        output = model(x)
    loss = (output * x).sum()
    with pytest.raises(NotExtendedError, match="computed nothing"), backpack(BatchGrad()):
        loss.backward()


def test_loss_was_not_extended() -> None:
    model = extend(nn.Linear(3, 3))
    loss = nn.CrossEntropyLoss()(model(torch.randn(2, 3)), torch.tensor([0, 1]))
    with pytest.raises(NotExtendedError) as error, backpack(DiagGGNExact()):
        loss.backward()
    for word in ("DiagGGNExact", "extend(lossfunc)", "Linear", "functional loss"):
        assert word in message(error)


def test_loss_was_not_extended_does_not_matter_for_first_order() -> None:
    model = extend(nn.Linear(3, 3))
    loss = nn.CrossEntropyLoss()(model(torch.randn(2, 3)), torch.tensor([0, 1]))
    with backpack(BatchGrad()):
        loss.backward()
    assert model.weight.grad_batch.shape == (2, 3, 3)


def test_functional_loss() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    loss = F.cross_entropy(model(torch.randn(2, 3)), torch.tensor([0, 1]))
    with (
        pytest.raises(NotExtendedError, match=r"there is none behind Tanh '1'.*functional loss"),
        backpack(DiagGGNExact()),
    ):
        loss.backward()


def test_unknown_loss() -> None:
    class Hinge(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (1 - x * y).relu().mean()

    problem = Problem(nn.Linear(3, 3), (torch.randn(2, 3),), Hinge(), torch.ones(2, 3))
    with pytest.raises(MissingPluginError) as error:
        problem.run(DiagGGNExact())
    for word in ("DiagGGNExact", "Hinge", "LossRule"):
        assert word in message(error)
    problem.check(second=False)


@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.CosineEmbeddingLoss()])
def test_monte_carlo_of_a_loss_without_a_likelihood(loss: nn.Module) -> None:
    if isinstance(loss, nn.L1Loss):
        problem = Problem(nn.Linear(3, 3), (torch.randn(2, 3),), loss, torch.ones(2, 3))
        with pytest.raises(UnsupportedError, match="nothing to sample"):
            problem.run(DiagGGNMC())
        return
    model, lossfunc = extend(nn.Linear(3, 3)), extend(loss)
    a, b = model(torch.randn(2, 3)), torch.randn(2, 3)
    with pytest.raises(MissingPluginError, match="CosineEmbeddingLoss"), backpack(DiagGGNMC()):
        lossfunc(a, b, torch.ones(2)).backward()


# Modules without a rule.


def test_fail_mode_error() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    with pytest.raises(MissingPluginError) as error:
        problem.run(BatchGrad(fail_mode="error"))
    for word in (
        "Shift '1'",
        "fail_mode is 'error'",
        "write a layer rule",
        "BatchGrad of backpack",
    ):
        assert word in message(error)


def test_fail_mode_warning() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    with pytest.warns(
        BackpackWarning, match=r"Shift '1' has no layer rule: BatchGrad leaves it out"
    ):
        problem.run(BatchGrad(fail_mode="warning"))
    assert not hasattr(problem.parameters[2], "grad_batch")
    assert hasattr(problem.parameters[0], "grad_batch")


def test_fail_mode_silent() -> None:
    problem = classification(nn.Sequential(nn.Linear(3, 3), Shift()), (3,))
    problem.run(DiagGGNExact(fail_mode="silent"))
    assert not hasattr(problem.parameters[2], "diag_ggn_exact")
    assert hasattr(problem.parameters[0], "diag_ggn_exact")


def test_all_errors_are_of_one_tree() -> None:
    from backpack_core import errors

    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(kinds) > 10
    for kind in kinds:
        assert issubclass(kind, (BackpackError, BackpackWarning))
        assert kind is BackpackError or kind is BackpackWarning or len(kind.__mro__) > 3
