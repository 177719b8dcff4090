"""Captured steps contain products of large matrices by either of two libraries."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import capture
from backpack_core import backpack, extend
from backpack_core.extensions import BatchL2Grad, TaskDotGrad, TaskGrad
from backpack_products import multiply
from backpack_products._torch import onednn_linear
from tests.versions import needs_compiler

TASKS, SAMPLES, WIDTH = 6, 96, 176


@pytest.fixture(autouse=True)
def _single_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether oneDNN is taken for the faster library."""
    try:
        onednn_linear(torch.ones(2, 2), torch.ones(2, 2))
    except (AttributeError, RuntimeError):
        pytest.skip("this build of torch lacks the operation")
    monkeypatch.setattr(multiply, "_is_faster", lambda: request.param)
    return bool(request.param)


def _made() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    return extend(nn.Sequential(*layers, nn.Linear(WIDTH, 3 * TASKS))), extend(nn.MSELoss())


def _found(model: nn.Module) -> list[Tensor]:
    names = ("grad_task", "task_dot", "batch_l2")
    return [getattr(p, name).clone() for p in model.parameters() for name in names]


@pytest.mark.parametrize(
    "compile", [None, pytest.param("inductor", marks=[needs_compiler, pytest.mark.long])]
)
def test_replays_are_what_the_engine_computes(faster: bool, compile: Any) -> None:
    if compile and not shutil.which("g++"):
        pytest.skip("nothing to compile with")
    model, lossfunc = _made()

    def loss(x: Tensor) -> Tensor:
        outputs = model(x).unflatten(1, (TASKS, 3))
        return torch.stack([lossfunc(outputs[:, n], x[:, :3]) for n in range(TASKS)]).sum()

    asked = [TaskGrad(), TaskDotGrad(), BatchL2Grad()]
    step: Any = capture(loss, model, lossfunc, *asked, gradient="none", compile=compile)
    for number in range(14):
        x = torch.randn(SAMPLES, WIDTH)
        step(x)
        if number == 12:
            step.wait()
        found = _found(model)
        with backpack(*asked, gradient="none", check="never"):
            loss(x).backward()
        for ours, right in zip(found, _found(model), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    assert re.search(r"[1-9]\d* replays", step.report()), step.report()
    # Inductor knows the operation for weights that are constants alone.
    is_called = faster and compile is None
    assert ("mkldnn__linear_pointwise_default(" in step.code) == is_called
    assert compile is None or "Inductor failed" not in step.report()
