"""Models of images and of sound in the transformers package, tiny and with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.models.text import BART, build
from benchmarks.models.trial import (
    CLASSES,
    SAMPLES,
    Trial,
    classes,
    ids,
    images,
    logits,
    unshifted,
)

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def pixels() -> dict[str, Tensor]:
    """Images alone."""
    return {"pixel_values": images()}


def classifier(name: str, config: str, **options: Any) -> Trial:
    """A model that predicts a class for each image."""
    make = build(config, "ForImageClassification", num_labels=CLASSES, **options)
    return Trial(name, make, pixels, logits, classes)


def spectrogram() -> dict[str, Tensor]:
    """Sound for Whisper: twice as many frames as the encoder has positions."""
    sound = torch.randn(SAMPLES, 4, 12, dtype=torch.float64)
    return {"input_features": sound, "decoder_input_ids": ids(4)}


WHISPER = {
    **BART,
    "num_mel_bins": 4,
    "max_source_positions": 6,
    "max_target_positions": 8,
}

TRIALS: list[Trial] = [
    classifier("ViT", "ViT", **SIZES),
    classifier("DeiT", "DeiT", **SIZES),
    classifier("BEiT", "Beit", **SIZES),
    classifier("DINOv2", "Dinov2", **SIZES),
    classifier(
        "Swin",
        "Swin",
        image_size=8,
        patch_size=2,
        embed_dim=4,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=2,
    ),
    classifier(
        "ConvNeXt", "ConvNext", hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, patch_size=2
    ),
    classifier(
        "ResNet (transformers)",
        "ResNet",
        embedding_size=4,
        hidden_sizes=[4, 6],
        depths=[1, 1],
        layer_type="basic",
    ),
    Trial(
        "Whisper",
        build("Whisper", "ForConditionalGeneration", **WHISPER),
        spectrogram,
        logits,
        lambda: ids(4),
        unshifted,
    ),
]
