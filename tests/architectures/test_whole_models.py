"""A few of the models of ``docs/models.md``: whole models, in every quantity that they have.

The page has all of them; what is not exact there is no test here.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the package whose models these are is not installed")
pytest.importorskip("peft", reason="the package whose adapters these are is not installed")

from benchmarks.models import adapters, plain, text, vision
from benchmarks.models.judge import Judge

TRIALS = {
    trial.name: trial for trial in (*plain.TRIALS, *text.TRIALS, *vision.TRIALS, *adapters.TRIALS)
}
FAMILIES = (
    "Llama", "Gemma", "Falcon", "RoBERTa", "XLNet", "DINOv2", "Swin", "ConvNeXt", "Whisper",
    "GPT-2, LoRA", "Llama, DoRA", "GRUCell",
)  # fmt: skip
QUANTITIES = ("first order", "GGN diagonal", "GGN, sampled", "Kronecker", "products")

# Packages build models, and these say what they do.
pytestmark = pytest.mark.filterwarnings("ignore:::transformers", "ignore:::peft")


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_quantity(name: str) -> None:
    judge = Judge(TRIALS[name])
    assert {quantity: judge.judge(quantity).reason for quantity in QUANTITIES} == dict.fromkeys(
        QUANTITIES, ""
    )


def test_more_than_thirty_models_are_tried() -> None:
    assert len(TRIALS) > 30
