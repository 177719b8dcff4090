"""Compares the extensions with automatic differentiation, on layers of all kinds."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.testing import (
    ExtensionCase,
    Quantity,
    Reference,
    check_import,
    parametrize_checks,
)
from torch import Tensor, nn

from backpack_plugin_fisher import DiagFisher, EmpiricalFisherRoot, SqrtFisher


def root(reference: Reference, name: str) -> Tensor:
    """``√c ∇ℓ_n``, from the gradients ``c ∇ℓ_n``."""
    factor = float(getattr(reference.loss, "factor", 1.0))
    if reference.loss.reduction == "mean":
        factor /= reference.samples
    gradients: Tensor = reference.gradients(name)
    return gradients / float(factor**0.5)


DIAGONAL = Quantity(
    lambda reference, name: root(reference, name).square().sum(0), needs="curvature"
)
CASES = [
    ExtensionCase(DiagFisher, DIAGONAL),
    ExtensionCase(SqrtFisher, Quantity(root, needs="curvature")),
]


@parametrize_checks(CASES)
def test_conformance(check: Callable[[], None]) -> None:
    """One test for each check of each case."""
    check()


def test_import() -> None:
    """It loads quickly, and imports nothing heavy for that."""
    check_import("backpack-plugin-fisher")


LOSSES = [nn.CrossEntropyLoss(reduction=r) for r in ("mean", "sum")]


@pytest.mark.parametrize("lossfunc", LOSSES, ids=lambda loss: str(loss.reduction))
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("subsampling", [None, [2, 0]])
def test_with_installed_layers(
    lossfunc: nn.CrossEntropyLoss, scale: float, subsampling: list[int] | None
) -> None:
    """Against a loop over samples, with a multiplied loss; one push serves both extensions."""
    torch.manual_seed(0)
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2)).double()
    inputs, targets = torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0])
    factor = scale / (4 if lossfunc.reduction == "mean" else 1)
    expected = []
    for n in subsampling or range(4):
        loss = nn.functional.cross_entropy(model(inputs[n : n + 1]), targets[n : n + 1])
        expected.append(torch.autograd.grad(loss, first.weight)[0] * factor**0.5)
    extend(model), extend(lossfunc)
    loss = scale * lossfunc(model(inputs), targets)
    start = EmpiricalFisherRoot.start
    with (
        patch.object(EmpiricalFisherRoot, "start", autospec=True, side_effect=start) as started,
        backpack(DiagFisher(subsampling), SqrtFisher(subsampling)),
    ):
        loss.backward()
    assert started.call_count == 1
    found: Any = first.weight
    torch.testing.assert_close(found.sqrt_fisher, torch.stack(expected), rtol=1e-10, atol=1e-14)
    diagonal = torch.stack(expected).square().sum(0)
    torch.testing.assert_close(found.diag_fisher, diagonal, rtol=1e-10, atol=1e-14)


def test_a_negative_factor_is_refused() -> None:
    """It has no real root."""
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    loss = -lossfunc(model(torch.rand(4, 3)), torch.rand(4, 2))
    with backpack(DiagFisher()), pytest.raises(UnsupportedError, match="negative number"):
        loss.backward()
