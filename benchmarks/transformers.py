"""Transformers of plain torch modules: pre-norm blocks with torch's fused attention, 4 layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, HEADS, TOKENS = 4, 4, 64


def _attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Of heads ``[N, H, L, D]``, joined: ``[N, L, H · D]``."""
    context = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    return context.transpose(1, 2).flatten(2)


class _Block(nn.Module):
    """One projection for queries, keys and values, and a perceptron with ``GELU``."""

    def __init__(self, width: int, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projections(self.before_attention(x))
        query, key, value = projected.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(_attend(query, key, value, self.is_causal))
        result: Tensor = x + self.mlp(self.before_mlp(x))
        return result


class GPT2(nn.Module):
    """GPT-2 on 64 tokens with a classifier of the last one."""

    def __init__(self, width: int = 128, vocabulary: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.Sequential(*[_Block(width, is_causal=True) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens, or images, the classes."""
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape)
        hidden = self.blocks(self.tokens(x) + self.positions(places))
        result: Tensor = self.head(self.norm(hidden)[:, -1])
        return result


class ViT(nn.Module):
    """A vision Transformer on patches of 4 × 4, with the mean over tokens."""

    def __init__(self, width: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*[_Block(width, is_causal=False) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens, or images, the classes."""
        hidden = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        result: Tensor = self.head(self.norm(hidden).mean(1))
        return result


class _LlamaBlock(nn.Module):
    """Rotary positions, keys and values for half of the heads, and a gated perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.size = width // HEADS
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        at = self.before_attention(x)
        query, key, value = (
            layer(at).unflatten(2, (-1, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        angle = _angles(x, self.size)
        key, value = (part.repeat_interleave(2, 1) for part in (_rotate(key, angle), value))
        x = x + self.out(_attend(_rotate(query, angle), key, value, is_causal=True))
        at = self.before_mlp(x)
        result: Tensor = x + self.down(F.silu(self.gate(at)) * self.up(at))
        return result


def _angles(x: Tensor, size: int) -> Tensor:
    """Of positions and pairs of features. Shape ``[L, D / 2]``."""
    rates = 1e4 ** (-torch.arange(0, size, 2, device=x.device) / size)
    return torch.arange(x.shape[1], device=x.device).unsqueeze(1) * rates


def _rotate(heads: Tensor, angle: Tensor) -> Tensor:
    """Each pair of features by its angle."""
    first, second = heads.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Llama(nn.Module):
    """Llama on 64 tokens with a classifier of the last one."""

    def __init__(self, width: int = 128, vocabulary: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[_LlamaBlock(width) for _ in range(LAYERS)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens, or images, the classes."""
        result: Tensor = self.head(self.norm(self.blocks(self.tokens(x)))[:, -1])
        return result
