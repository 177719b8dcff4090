"""``gradient_checkpointing_enable()`` of the transformers package, of both kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the package whose models these are is not installed")

from backpack_core import backpack, extend
from backpack_core.extensions import KFAC, BatchGrad, DiagGGNExact
from benchmarks.models import text, vision
from benchmarks.models.trial import Trial

pytestmark = pytest.mark.filterwarnings(
    "ignore:::transformers", "ignore::backpack_core.errors.AutodiffFallbackWarning"
)
TRIALS = {trial.name: trial for trial in (*text.TRIALS, *vision.TRIALS)}
FIELDS = ("grad", "grad_batch", "diag_ggn_exact", "kfac")


def run(trial: Trial, options: dict[str, Any] | None) -> list[Tensor]:
    """Every quantity in train mode, with checkpoints or without."""
    model, inputs, lossfunc, target = trial.build()
    model.train()
    if options is not None:
        model.net.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    extend(model), extend(lossfunc)
    loss = lossfunc(model(**inputs), target)
    torch.manual_seed(0)
    with backpack(BatchGrad(), DiagGGNExact(), KFAC(fail_mode="block")):
        loss.backward()
    values = [getattr(p, f, None) for p in model.parameters() if p.grad is not None for f in FIELDS]
    found = [value.dense() if hasattr(value, "dense") else value for value in values]
    assert all(value is not None for value in found)
    return found


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "T5", "ViT"])
def test_as_without_checkpoints(name: str, reentrant: bool) -> None:
    trial = TRIALS[name]
    expected = run(trial, None)
    found = run(trial, {"use_reentrant": reentrant})
    assert len(found) == len(expected) > 40
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference)
