"""Fine-tuning by the peft package: few parameters beside frozen ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.nn import Module

from benchmarks.models.text import GPT2, GROUPED, PLAIN, build, tokens
from benchmarks.models.trial import STEPS, Trial, ids, logits, shifted


def adapt(make: Callable[[], Module], config: str, **options: Any) -> Callable[[], Module]:
    """A factory of a model with adapters."""

    def made() -> Module:
        import peft

        settings = getattr(peft, config)(task_type="CAUSAL_LM", **options)
        model: Module = peft.get_peft_model(make(), settings)
        return model

    return made


def trial(name: str, config: str, llama: bool = True, **options: Any) -> Trial:
    """A causal language model with adapters."""
    plain = (
        build("Llama", "ForCausalLM", **PLAIN, **GROUPED)
        if llama
        else build("GPT2", "LMHeadModel", **GPT2)
    )
    make = adapt(plain, config, **options)
    return Trial(name, make, tokens, logits, ids, shifted)


PROJECTIONS = ["q_proj", "v_proj"]
TRIALS: list[Trial] = [
    trial("Llama, LoRA", "LoraConfig", r=2, target_modules=PROJECTIONS),
    trial("GPT-2, LoRA", "LoraConfig", llama=False, r=2, target_modules=["c_attn"]),
    trial("Llama, DoRA", "LoraConfig", r=2, use_dora=True, target_modules=PROJECTIONS),
    trial(
        "Llama, IA3",
        "IA3Config",
        target_modules=[*PROJECTIONS, "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    replace(
        trial("GPT-2, prompt tuning", "PromptTuningConfig", llama=False, num_virtual_tokens=2),
        target=lambda: ids(STEPS + 2),
    ),
]
