"""What warnings and errors say: whose line, which parameter, which class, and the true reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import (
    AutodiffFallbackWarning,
    BackpackError,
    BackpackWarning,
    UncoveredParameterWarning,
    UnsupportedError,
)
from backpack_core.extensions import KFRA, BatchGrad, DiagGGNExact, SumGradSquared
from tests import oracle
from tests.cases import Net, classification


class Linear(nn.Module):
    """Somebody's layer, with the name of another one."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.weight)


class Noisy(Linear):
    """Draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * torch.rand_like(x)


class Bare(nn.Module):
    """Uses a parameter of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"first": nn.Linear(3, 3), "scale": Linear()})

    def forward(self, x: Tensor) -> Tensor:
        return self.block["first"](x) * self.block["scale"].weight


def _caught(model: nn.Module, *extensions: Any) -> list[warnings.WarningMessage]:
    """The warnings of a step."""
    extend(model), (lossfunc := extend(nn.CrossEntropyLoss()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = lossfunc(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long))
        with backpack(*extensions):
            loss.backward()
    return [w for w in caught if issubclass(w.category, BackpackWarning)]


def _hidden() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(Linear(), nn.Linear(3, 3)))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], type[Warning]]] = {
    "no_rule": (_hidden, BatchGrad, AutodiffFallbackWarning),
    "left_out": (_hidden, lambda: BatchGrad(fail_mode="warning"), BackpackWarning),
    "uncovered": (Bare, lambda: KFRA(fail_mode="warning"), UncoveredParameterWarning),
    "second_order": (_hidden, DiagGGNExact, AutodiffFallbackWarning),
}


@pytest.mark.host("a default device has a line of its own")
@pytest.mark.parametrize("name", CASES)
def test_a_warning_points_at_the_users_line(name: str) -> None:
    make, extension, category = CASES[name]
    (warning,) = _caught(make(), extension())
    assert warning.category is category
    assert warning.filename == __file__
    with open(__file__) as file:
        assert "loss.backward()" in file.readlines()[warning.lineno - 1]


@pytest.mark.parametrize("name", ["no_rule", "left_out", "second_order"])
def test_a_class_is_named_with_its_module(name: str) -> None:
    """``Linear has no layer rule`` is read as one of torch's."""
    make, extension, _ = CASES[name]
    (warning,) = _caught(make(), extension())
    assert f"{Linear.__module__}.Linear" in str(warning.message)
    assert "'1.0'" in str(warning.message)


def test_a_class_of_torch_needs_no_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(BackpackError, match="BatchNorm1d '1'") as error:
        _caught(model, DiagGGNExact())
    assert "torch.nn.modules" not in str(error.value)


def test_an_uncovered_parameter_is_named_by_its_path() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.deep[0](x) - net.deep[1][0].bias

    deep = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(UnsupportedError, match=r"The parameter deep\.1\.0\.bias"):
        _caught(Net(forward, deep=deep), KFRA())


def test_a_parameter_that_is_used_twice_is_named_by_its_path() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.block(x) @ net.block[0].weight

    model = Net(forward, block=nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(UnsupportedError, match=r"block\.0\.weight"):
        _caught(model, KFRA())


# Parameters that a module owns and does not use


class Embedded(nn.Module):
    """Patches with a class token; the token for masked patches is for training with masks."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 4))
        self.mask_token = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        patches = self.proj(x)
        if mask is not None:
            patches = torch.where(mask.unsqueeze(-1), self.mask_token, patches)
        return torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1)


class Positions(nn.Module):
    """A table of positions, used or not."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.randn(4))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        return scaled + self.table if self.used else scaled


UNUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mask_token": (
        lambda: nn.Sequential(Embedded((1, 4)), nn.Flatten(), nn.Linear(24, 3)), (5, 3),
    ),
    "mask_token-flat": (
        lambda: nn.Sequential(Embedded((4,)), nn.Flatten(), nn.Linear(24, 3)), (5, 3),
    ),
    "positions": (lambda: nn.Sequential(nn.Linear(3, 4), Positions(False), nn.Linear(4, 3)), (3,)),
    "positions-used": (
        lambda: nn.Sequential(nn.Linear(3, 4), Positions(True), nn.Linear(4, 3)), (3,),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("name", UNUSED)
def test_a_parameter_that_is_not_used(name: str, batch: int) -> None:
    """As for any that the loss does not depend on: nothing, or zero."""
    make, shape = UNUSED[name]
    problem = classification(make(), shape, batch)
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.run(BatchGrad(), SumGradSquared(), DiagGGNExact())
    for p, gradient, diagonal in zip(problem.parameters, gradients, diagonals, strict=True):
        if p.grad is None and not hasattr(p, "grad_batch"):
            assert not hasattr(p, "diag_ggn_exact")
            continue
        oracle.assert_close(p.grad_batch, gradient)  # type: ignore[attr-defined]
        oracle.assert_close(p.diag_ggn_exact, diagonal)  # type: ignore[attr-defined]
