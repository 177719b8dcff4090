"""A small GPT of letters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

ALPHABET = " abcdefghijklmnopqrstuvwxyz."


class Block(nn.Module):
    """Causal attention and a feed-forward part, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, S, D]`` to the same."""
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return found


class CharacterGPT(nn.Module):
    """Codes of letters ``[N, S]`` to scores of the next letter, ``[N, C, S]``."""

    def __init__(self, length: int, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        """Make the layers.

        Args:
            length: The largest number of letters in a text.
            width: The width of the model.
            heads: The number of attention heads.
            layers: The number of blocks.
        """
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, codes: Tensor) -> Tensor:
        """Scores of the next letter at each place."""
        x = self.blocks(self.letters(codes) + self.places[: codes.shape[1]])
        found: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return found
