"""Compares the extension with automatic differentiation, on layers of all kinds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backpack_core import Extension, backpack, extend
from backpack_core.testing import (
    ExtensionCase,
    Quantity,
    Reference,
    check_import,
    parametrize_checks,
)
from torch import Tensor, nn

from backpack_plugin_snr import SNR


def snr(reference: Reference, name: str) -> Tensor:
    """Squared mean over variance of the individual gradients."""
    gradients = reference.gradients(name)
    return gradients.mean(0).square() / gradients.var(0, unbiased=False)


ALONE = {"batch_of_one": "a single sample has no variance: SNR raises"}
CASES = [ExtensionCase(SNR, Quantity(snr), expected_failures=ALONE)]


@parametrize_checks(CASES)
def test_conformance(check: Callable[[], None]) -> None:
    """One test for each check of each case."""
    check()


def test_import() -> None:
    """It loads quickly, and imports nothing heavy for that."""
    check_import("backpack-plugin-snr")


def run(model: nn.Module, *extensions: Extension) -> None:
    """One backward pass."""
    lossfunc = extend(nn.MSELoss())
    loss = lossfunc(extend(model)(torch.ones(4, 2)), torch.zeros(4, 1))
    with backpack(*extensions):
        loss.backward()


@pytest.mark.parametrize(("weight", "expected"), [(1.0, torch.inf), (0.0, 0.0)])
def test_without_noise(weight: float, expected: float) -> None:
    """Equal samples: infinite where there is a gradient, zero where there is none."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    run(model, SNR())
    found: Any = model.weight
    assert torch.equal(found.snr, torch.full((1, 2), expected))


def test_one_pass_serves_variance_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read the same two operations: next to ``Variance``, this extension is free."""
    from backpack_core.extensions import Variance
    from backpack_firstorder import contractions

    calls: list[str] = []
    original = contractions.moments

    def counted(*args: Any) -> contractions.Moments:
        calls.append("moments")
        return original(*args)

    monkeypatch.setattr(contractions, "moments", counted)
    model = nn.Linear(2, 1, bias=False)
    outputs = extend(model)(torch.rand(4, 3, 2))  # of several positions, which take one reading
    loss = extend(nn.MSELoss())(outputs, torch.zeros(4, 3, 1))
    with backpack(SNR(), Variance()):
        loss.backward()
    assert len(calls) == 1
    found: Any = model.weight
    assert found.snr.shape == found.variance.shape == model.weight.shape
