"""Modules of torch with several inputs, several outputs, or parts: recurrent nets, attention, …"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.nets.kinds import Shapes, axes, divisor, module, need
from tests.nets.recipe import Settings


def _embedding(settings: Settings, shapes: Shapes) -> nn.Module:
    return nn.Embedding(settings["tokens"], settings["width"], padding_idx=settings["padding"])


def _draw_embedding(random: Random, shapes: Shapes) -> dict[str, Any]:
    padding = 0 if random.random() < 0.3 else None
    return {"tokens": 4, "width": random.randint(2, 4), "padding": padding}


module("Embedding", _embedding, _draw_embedding, weight=1, traits="tokens hessian")


def _draw_embedding_bag(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 1)
    return {"tokens": 4, "width": random.randint(2, 4)}


module(
    "EmbeddingBag",
    lambda s, shapes: nn.EmbeddingBag(s["tokens"], s["width"], mode="sum"),
    _draw_embedding_bag,
    weight=0.2,
    traits="tokens",
)

TAKES = ("sequence", "last", "states", "both")


def _draw_recurrent(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2)
    settings: dict[str, Any] = {
        "name": random.choice(["LSTM", "GRU", "RNN"]),
        "hidden": random.randint(1, 3),
        "layers": random.choice([1, 1, 2]),
        "bias": random.random() < 0.8,
        "bidirectional": random.random() < 0.3,
        "take": random.choice(TAKES),
    }
    if settings["name"] == "LSTM" and settings["hidden"] > 1 and random.random() < 0.2:
        settings["proj_size"] = 1
    return settings


def _recurrent(settings: Settings, shapes: Shapes) -> nn.Module:
    extra = {"proj_size": settings["proj_size"]} if "proj_size" in settings else {}
    kind: Callable[..., nn.Module] = getattr(nn, settings["name"])
    return kind(
        shapes[0][-1],
        settings["hidden"],
        num_layers=settings["layers"],
        bias=settings["bias"],
        batch_first=True,
        bidirectional=settings["bidirectional"],
        **extra,
    )


def _run_recurrent(part: nn.Module, settings: Settings, x: Tensor) -> Any:
    sequence, state = part(x)
    states = state if isinstance(state, tuple) else (state,)
    if settings["take"] == "sequence":
        return sequence
    if settings["take"] == "last":
        return states[-1][-1]
    if settings["take"] == "states":
        return tuple(s.transpose(0, 1) for s in states)
    return sequence, states[0][-1]


module("Recurrent", _recurrent, _draw_recurrent, _run_recurrent, weight=6)


def _draw_cell(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 1)
    name = random.choice(["LSTMCell", "GRUCell", "RNNCell"])
    return {"name": name, "hidden": random.randint(1, 3)}


module(
    "Cell",
    lambda s, shapes: getattr(nn, s["name"])(shapes[0][-1], s["hidden"]),
    _draw_cell,
    weight=1.5,
)


def _draw_attention(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2)
    need(shapes[0][-1] > 1)
    return {
        "heads": divisor(random, shapes[0][-1]),
        "bias": random.random() < 0.8,
        "weights": random.choice(["none", "averaged", "all"]),
        "bias_kv": random.random() < 0.1,
        "mask": random.random() < 0.3,
    }


def _attention(settings: Settings, shapes: Shapes) -> nn.Module:
    width, other = shapes[0][-1], shapes[-1][-1]
    return nn.MultiheadAttention(
        width,
        settings["heads"],
        bias=settings["bias"],
        add_bias_kv=settings["bias_kv"],
        kdim=other if other != width else None,
        vdim=other if other != width else None,
        batch_first=True,
    )


def _run_attention(part: nn.Module, settings: Settings, *values: Tensor) -> Any:
    query, context = values[0], values[-1]
    length, other = query.shape[1], context.shape[1]
    mask = torch.ones(length, other, dtype=torch.bool).triu(1) if settings["mask"] else None
    output, weights = part(
        query,
        context,
        context,
        need_weights=settings["weights"] != "none",
        average_attn_weights=settings["weights"] == "averaged",
        attn_mask=mask,
    )
    return output if weights is None else (output, weights)


def _draw_cross_attention(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[1], 2)
    return _draw_attention(random, shapes)


module("Attention", _attention, _draw_attention, _run_attention, weight=5)
module("CrossAttention", _attention, _draw_cross_attention, _run_attention, arity=2, weight=3)


def _encoder_layer(settings: Settings, shapes: Shapes) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shapes[0][-1],
        settings["heads"],
        dim_feedforward=3,
        dropout=settings["dropout"],
        batch_first=True,
        norm_first=settings["norm_first"],
    )


def _draw_encoder_layer(random: Random, shapes: Shapes) -> dict[str, Any]:
    axes(shapes[0], 2)
    need(shapes[0][-1] > 2)
    return {
        "heads": divisor(random, shapes[0][-1]),
        "norm_first": random.random() < 0.5,
        "dropout": random.choice([0.0, 0.0, 0.3]),
    }


module("EncoderLayer", _encoder_layer, _draw_encoder_layer, weight=0.7, traits="random")


def _draw_bilinear(random: Random, shapes: Shapes) -> dict[str, Any]:
    need(shapes[0][:-1] == shapes[1][:-1])
    return {"out": random.randint(1, 3)}


module(
    "Bilinear",
    lambda s, shapes: nn.Bilinear(shapes[0][-1], shapes[1][-1], s["out"]),
    _draw_bilinear,
    arity=2,
)


def _chain(settings: Settings, shapes: Shapes) -> nn.Module:
    inner: Any = getattr(nn, settings["name"])
    middle = inner(inplace=True) if settings["inplace"] else inner()
    width = shapes[0][-1]
    return nn.Sequential(nn.Linear(width, 3), middle, nn.Dropout(0.0), nn.Linear(3, width))


def _draw_chain(random: Random, shapes: Shapes) -> dict[str, Any]:
    name = random.choice(["ReLU", "SiLU", "Hardswish", "ELU"])
    return {"name": name, "inplace": random.random() < 0.5}


module("Chain", _chain, _draw_chain, weight=2, traits="hessian in_place")
