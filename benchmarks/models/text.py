"""Language models of the transformers package: tiny configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from benchmarks.models.trial import (
    CLASSES,
    STEPS,
    VOCABULARY,
    Trial,
    classes,
    ids,
    logits,
    shifted,
    unshifted,
)

WIDTH = 8
# How configurations call the sizes.
PLAIN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {"num_key_value_heads": 1, "head_dim": 4}


def build(config: str, head: str, attention: str = "eager", **options: Any) -> Callable[[], Module]:
    """A factory of one model by the names of its configuration and of the model.

    Args:
        config: As ``"Llama"`` for ``LlamaConfig``.
        head: As ``"ForCausalLM"``.
        attention: Which implementation: eager attention can be differentiated twice.
        options: Of the configuration.
    """

    def make() -> Module:
        import transformers

        settings = getattr(transformers, f"{config}Config")(**options)
        settings._attn_implementation = attention
        settings._experts_implementation = "eager"  # the others know no double precision
        model: Module = getattr(transformers, f"{config}{head}")(settings)
        return model

    return make


def tokens() -> dict[str, Tensor]:
    """Tokens alone."""
    return {"input_ids": ids()}


def padded() -> dict[str, Tensor]:
    """Tokens, of which some are padding."""
    mask = torch.ones(3, STEPS, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def both() -> dict[str, Tensor]:
    """Tokens for an encoder and a decoder."""
    return {"input_ids": ids(), "decoder_input_ids": ids(4)}


def causal(name: str, config: str, head: str = "ForCausalLM", **options: Any) -> Trial:
    """A model that predicts a token at each position."""
    inputs = options.pop("inputs", tokens)
    make = build(config, head, **options)
    return Trial(name, make, inputs, logits, ids, shifted)


def classifier(name: str, config: str, **options: Any) -> Trial:
    """A model that predicts a class for each sequence."""
    inputs = options.pop("inputs", padded)
    head = options.pop("head", "ForSequenceClassification")
    make = build(config, head, num_labels=CLASSES, **SPECIAL, **options)
    return Trial(name, make, inputs, logits, classes)


def seq2seq(name: str, config: str, **options: Any) -> Trial:
    """A model with an encoder and a decoder."""
    make = build(config, "ForConditionalGeneration", **options)
    return Trial(name, make, both, logits, lambda: ids(4), unshifted)


GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    **SPECIAL,
}

TRIALS: list[Trial] = [
    causal("GPT-2", "GPT2", "LMHeadModel", **GPT2),
    causal("GPT-2, sdpa attention", "GPT2", "LMHeadModel", attention="sdpa", **GPT2),
    causal("GPT-NeoX", "GPTNeoX", **PLAIN),
    causal("OPT", "OPT", ffn_dim=12, word_embed_proj_dim=WIDTH, **PLAIN, **SPECIAL),
    causal("Falcon", "Falcon", **PLAIN),
    causal("Llama", "Llama", **PLAIN, **GROUPED),
    causal("Llama, padded", "Llama", inputs=padded, **PLAIN, **GROUPED),
    causal("Llama, tied", "Llama", tie_word_embeddings=True, **PLAIN, **GROUPED),
    causal("Mistral", "Mistral", **PLAIN, **GROUPED),
    causal("Qwen2", "Qwen2", **PLAIN, num_key_value_heads=1),
    causal("Qwen3", "Qwen3", **PLAIN, **GROUPED),
    causal("Gemma", "Gemma", **PLAIN, **GROUPED),
    causal("Phi", "Phi", **PLAIN),
    causal("Mixtral", "Mixtral", num_local_experts=2, num_experts_per_tok=1, **PLAIN, **GROUPED),
    causal(
        "Mamba",
        "Mamba",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=4,
        num_hidden_layers=1,
        use_cache=False,
    ),
    classifier("BERT", "Bert", **PLAIN, **DROPOUT),
    classifier("RoBERTa", "Roberta", **PLAIN, **DROPOUT),
    classifier(
        "DistilBERT",
        "DistilBert",
        vocab_size=VOCABULARY,
        dim=WIDTH,
        hidden_dim=12,
        n_layers=1,
        n_heads=2,
        max_position_embeddings=16,
    ),
    classifier("ALBERT", "Albert", embedding_size=6, **PLAIN, **DROPOUT),
    classifier("ELECTRA", "Electra", embedding_size=6, **PLAIN, **DROPOUT),
    classifier("DeBERTa", "Deberta", **PLAIN, **DROPOUT),
    classifier(
        "XLNet", "XLNet", vocab_size=VOCABULARY, d_model=WIDTH, n_layer=1, n_head=2, d_inner=12
    ),
    seq2seq("T5", "T5", **T5),
    seq2seq("BART", "Bart", **BART),
]
