"""Embeddings, recurrent layers and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import Module

from backpack_core.testing import Arguments, RuleCase
from tests.conformance.layer import layer


def tokens(factory: Callable[[], Module], *shape: int, **options: Any) -> RuleCase:
    """A layer on indices ``[N, *shape]`` below five."""
    return RuleCase(factory, lambda n: torch.randint(0, 5, (n, *shape)), **options)


def recurrent(kind: type[Module], hidden: int = 2, **options: Any) -> RuleCase:
    """A recurrent layer on four steps."""
    text = ",".join(f"{key}={value}" for key, value in options.items())
    options.setdefault("batch_first", True)
    name = f"{kind.__name__}({text})"
    return layer(lambda: kind(2, hidden, **options).eval(), 4, 2, name=name)


def attention(**options: Any) -> Callable[[], Module]:
    """Attention with random biases: torch starts from zeros."""

    def make() -> Module:
        module = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        for parameter in module.parameters():
            parameter.data.normal_(std=0.7)
        return module

    return make


def queries(n: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value of different lengths."""
    return torch.randn(n, 2, 4), torch.randn(n, 5, 4), torch.randn(n, 5, 4)


CAUSAL = torch.ones(2, 5, dtype=torch.bool).triu(1)

CASES: list[RuleCase] = [
    tokens(lambda: nn.Embedding(5, 2)),
    tokens(lambda: nn.Embedding(5, 2), 4, name="Embedding, positions"),
    tokens(lambda: nn.Embedding(5, 2, padding_idx=1), 4),
    tokens(lambda: nn.EmbeddingBag(5, 2, mode="sum"), 4, twice_differentiable=False),
    tokens(
        lambda: nn.EmbeddingBag(5, 2, mode="mean", padding_idx=1), 4, twice_differentiable=False
    ),
    tokens(lambda: nn.EmbeddingBag(5, 2, mode="max"), 4, twice_differentiable=False),
    RuleCase(
        lambda: nn.EmbeddingBag(5, 2, mode="sum"),
        lambda n: Arguments(
            (torch.randint(0, 5, (n, 4)),), {"per_sample_weights": torch.randn(n, 4)}
        ),
        name="EmbeddingBag, weighted",
        twice_differentiable=False,
        expected_failures={"autocast": "torch wants weights and table in one dtype"},
    ),
    recurrent(nn.RNN),
    recurrent(nn.RNN, nonlinearity="relu", bias=False),
    recurrent(nn.RNN, num_layers=2, bidirectional=True),
    recurrent(nn.LSTM),
    # Its oracle takes a pass for each of its parameters: what has hidden states of two is above.
    recurrent(nn.LSTM, 1, num_layers=2, bidirectional=True),
    recurrent(nn.LSTM, 2, proj_size=1),
    recurrent(nn.GRU),
    recurrent(nn.GRU, num_layers=2, bias=False),
    RuleCase(
        lambda: nn.LSTM(2, 2, batch_first=True),
        lambda n: (torch.randn(n, 4, 2), (torch.randn(1, n, 2), torch.randn(1, n, 2))),
        name="LSTM, initial state",
        expected_failures={
            "subsampled_call": "initial states that require a gradient refuse subsampling"
        },
    ),
    layer(lambda: nn.RNNCell(2, 4), 2, name="RNNCell"),
    layer(lambda: nn.LSTMCell(2, 4), 2, name="LSTMCell"),
    layer(lambda: nn.GRUCell(2, 4), 2, name="GRUCell"),
    RuleCase(
        lambda: nn.RNNCell(2, 4, bias=False, nonlinearity="relu"),
        lambda n: (torch.randn(n, 2), torch.randn(n, 4)),
        name="RNNCell, state",
    ),
    RuleCase(
        lambda: nn.GRUCell(2, 4),
        lambda n: (torch.randn(n, 2), torch.randn(n, 4)),
        name="GRUCell, state",
    ),
    *(
        RuleCase(
            lambda: nn.LSTMCell(2, 4),
            lambda n: (torch.randn(n, 2), (torch.randn(n, 4), torch.randn(n, 4))),
            name=f"LSTMCell, {('hidden', 'cell')[number]} state",
            output_nr=number,
        )
        for number in (0, 1)
    ),
    RuleCase(
        attention(),
        lambda n: (*[torch.randn(n, 2, 4)] * 3,),
        name="MultiheadAttention, self",
    ),
    RuleCase(attention(), queries, name="MultiheadAttention, cross"),
    RuleCase(
        attention(bias=False, add_bias_kv=True, add_zero_attn=True),
        queries,
        name="MultiheadAttention, extra positions",
    ),
    RuleCase(
        attention(),
        lambda n: Arguments(queries(n), {"attn_mask": CAUSAL, "need_weights": False}),
        name="MultiheadAttention, masked",
        twice_differentiable=False,
    ),
]
