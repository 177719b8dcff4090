"""Quantities by the names of parameters, for code with checked types."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import backpack_core
from backpack_core import backpack, extend, quantities
from backpack_core.errors import nearest
from backpack_core.extensions import KFAC, BatchGrad
from tests.forks import python


def run() -> nn.Sequential:
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    model[1].bias.requires_grad_(False)
    loss = extend(nn.MSELoss())(model(torch.randn(4, 3)), torch.randn(4, 2))
    with backpack(BatchGrad(), KFAC()):
        loss.backward()
    return model


def test_they_are_the_attributes() -> None:
    model = run()
    found = quantities(model)
    assert list(found) == ["0.weight", "0.bias", "1.weight"]
    assert len(found) == 3
    assert found["0.weight"].grad_batch is model[0].weight.grad_batch
    assert found["0.weight"].parameter is model[0].weight
    assert found["1.weight"].kfac is model[1].weight.kfac
    assert repr(found["0.bias"]) == "<quantities of '0.bias': grad_batch, kfac>"


def test_near_misses() -> None:
    found = quantities(run())
    with pytest.raises(AttributeError, match="no quantity 'grad_batsh': did you mean 'grad_batch'"):
        found["0.weight"].grad_batsh  # noqa: B018
    with pytest.raises(KeyError, match=r"did you mean .0\.weight"):
        found["0.wieght"]
    with pytest.raises(AttributeError, match="It has: none"):
        quantities(nn.Linear(2, 2))["weight"].kfac  # noqa: B018


@pytest.mark.parametrize(("name", "near"), [("Backpack", "backpack"), ("extnd", "extend")])
def test_a_near_miss_of_a_public_name(name: str, near: str) -> None:
    with pytest.raises(AttributeError, match=f"did you mean '{near}'"):
        getattr(backpack_core, name)
    # Tools look whether there is a name: one that is near must not raise another error.
    assert not any(hasattr(backpack_core, other) for other in (name, "__wrapped__", "qqqq"))


def test_a_near_miss_is_suggested_once() -> None:
    """Python suggests a name, too, where the error does not say for which one it is."""
    command = [sys.executable, "-c", "import backpack_core; backpack_core.extnd"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("has no attribute 'extnd': did you mean 'extend'?\n")


def test_extensions_are_there_without_an_import_of_their_own() -> None:
    done = python("import backpack_core; print(backpack_core.extensions.BatchGrad.__name__)")
    assert done.strip() == "BatchGrad"


def test_a_name_is_not_suggested_for_itself() -> None:
    """It is known to exist, and the message says where."""
    assert nearest("KFAC", ["KFRA", "KFAC"]) == ""
    assert nearest("kfac", ["KFRA", "KFAC"]) == ": did you mean 'KFAC'?"


@pytest.mark.parametrize("name", ["extensions", "context", "fields", "errors", "plugins", "api"])
def test_modules_whose_names_are_near_public_ones(name: str) -> None:
    done = python(f"from backpack_core import {name}; print({name}.__name__)")
    assert done.strip() == f"backpack_core.{name}"
