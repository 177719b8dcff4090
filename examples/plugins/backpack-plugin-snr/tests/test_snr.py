"""Compares the extension with automatic differentiation, on layers of all kinds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backpack_core import backpack, extend, ops
from backpack_core.testing import (
    ExtensionCase,
    Quantity,
    Reference,
    parametrize_extension_checks,
)
from torch import Tensor, nn

from backpack_plugin_snr import SNR


def snr(reference: Reference, name: str) -> Tensor:
    """Squared mean over variance of the individual gradients."""
    gradients = reference.gradients(name)
    return gradients.mean(0).square() / gradients.var(0, unbiased=False)


ALONE = {"value_batch_of_one": "a single sample has no variance: SNR raises"}
CASES = [ExtensionCase(SNR, Quantity(snr), expected_failures=ALONE)]


@parametrize_extension_checks(CASES)
def test_conformance(check: Callable[[], None]) -> None:
    """One test for each check of each case."""
    check()


def run(model: nn.Module, *extensions: SNR) -> None:
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


def test_contractions_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two extensions that read the same contractions cost one computation of each."""
    calls: list[str] = []
    original = ops.square_sum

    def counted(*args: Any) -> Tensor:
        calls.append("square_sum")
        return original(*args)

    monkeypatch.setattr(ops, "square_sum", counted)
    run(nn.Linear(2, 1, bias=False), SNR(), SNR(savefield="again"))
    assert len(calls) == 1
