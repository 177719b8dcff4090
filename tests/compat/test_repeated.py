"""Extensions by the incumbent's names are repeated, too: results are what the engine computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from backpack_capture import visits
from tests.compat.nets import data, linear_net

NAMES = [
    "BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance",
    "DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC", "SqrtGGNExact", "SqrtGGNMC",
    "DiagHessian", "BatchDiagHessian", "KFAC", "KFLR", "KFRA",
]  # fmt: skip
PASSES = 8


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FIRST", 1)


def train(make: Any) -> tuple[int, list[Tensor], nn.Module]:
    """How many passes were repeated, all results of all passes, and the model."""
    torch.manual_seed(0)
    model, lossfunc = extend(linear_net().double()), extend(nn.CrossEntropyLoss())
    repeated, found = 0, list[Tensor]()
    for _ in range(PASSES):
        model.zero_grad()
        x, y = data(3)
        loss, extension = lossfunc(model(x.double()), y), make()
        with backpack(extension) as block:
            loss.backward()
        repeated += block._history["repeated a recording"]
        for parameter in model.parameters():
            value = getattr(parameter, extension.savefield)
            found += [v.clone() for v in (value if isinstance(value, list) else [value])]
            parameter.data -= 0.1 * parameter.grad
    return repeated, found, model


@pytest.mark.parametrize("name", NAMES)
def test_built_in_extensions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated, found, model = train(getattr(extensions, name))
    monkeypatch.setattr(visits, "_may_repeat", lambda run: False)
    never, expected, _ = train(getattr(extensions, name))
    assert repeated
    assert not never
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=0.0, atol=0.0)
    assert not any(hasattr(part, "input0") or hasattr(part, "output") for part in model)


def test_hooks_find_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    model, lossfunc = extend(linear_net()), extend(nn.CrossEntropyLoss())
    repeated = 0
    for _ in range(PASSES):
        (x, y), seen = data(3), list[tuple[nn.Module, Tensor, Tensor]]()

        def hook(module: nn.Module, seen: list[Any] = seen) -> None:
            seen.append((module, module.input0, module.output))

        loss = lossfunc(model(x), y)
        hidden = model[0](x), model[1](model[0](x))
        with backpack(extensions.BatchGrad(), extension_hook=hook) as block:
            loss.backward()
        repeated += block._history["repeated a recording"]
        expected = [(model[2], hidden[1]), (model[1], hidden[0]), (model[0], x)]
        assert [module for module, _, _ in seen] == [lossfunc, *[module for module, _ in expected]]
        for (_, found, out), (module, right) in zip(seen[1:], expected, strict=True):
            assert torch.equal(found, right)
            assert torch.equal(out, module(right))
    assert repeated


class Counting(FirstOrderModuleExtension):
    """A module extension of a user's, which does more than compute."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(params=["weight", "bias"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        Counting.calls += 1
        return torch.einsum("no,ni->noi", g_out[0], module.input0)

    def bias(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        gradient: Tensor = g_out[0]
        return gradient


def test_module_extensions_of_users_are_called_in_every_pass() -> None:
    def make() -> Any:
        extension = extensions.BatchGrad()
        extension.set_module_extension(nn.Linear, Counting(), overwrite=True)
        return extension

    Counting.calls = 0
    assert not train(make)[0]
    assert Counting.calls == 2 * PASSES
