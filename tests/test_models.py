"""Whole models with ordinary functional forward passes, exact against autograd."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import Problem, classification


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation, and a shortcut with a projection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.project = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.project(x)
        return F.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3, padding=1)
        self.block1 = ResidualBlock(2, 2, 1)
        self.block2 = ResidualBlock(2, 3, 2)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.block1(self.stem(x).relu()))
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def trained_statistics(model: nn.Module) -> nn.Module:
    """Batch normalisations that have seen data, in evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


def test_residual_net_with_batch_normalisation_in_evaluation_mode() -> None:
    classification(trained_statistics(ResNet()), (1, 4, 4)).check()


class UNet(nn.Module):
    """One level down and up again, with a skip connection by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 2, 3, padding=1)
        self.norm1 = nn.GroupNorm(1, 2)
        self.deep = nn.Conv2d(2, 4, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.norm1(self.down(x)))
        deep = F.silu(self.norm2(self.deep(F.max_pool2d(skip, 2))))
        result: Tensor = self.out(torch.cat([skip, self.up(deep)], 1))
        return result


def test_u_net_with_group_normalisation_and_transposed_convolution() -> None:
    model, x = UNet(), torch.randn(2, 1, 4, 4)
    Problem(model, (x,), nn.CrossEntropyLoss(), torch.randint(0, 2, (2, 4, 4))).check()


class Tagger(nn.Module):
    """A label for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, padding_idx=0)
        self.lstm = nn.LSTM(3, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        result: Tensor = self.head(torch.tanh(hidden)).transpose(1, 2)
        return result


def test_lstm_tagger() -> None:
    tokens, labels = torch.randint(0, 7, (3, 4)), torch.randint(0, 3, (3, 4))
    labels[tokens == 0] = -100  # padding counts nowhere
    Problem(Tagger(), (tokens,), nn.CrossEntropyLoss(), labels).check()


class Classifier(nn.Module):
    """Embeddings of tokens and positions, a transformer encoder, and the mean over positions."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.positions = nn.Embedding(5, 4)
        layer = nn.TransformerEncoderLayer(
            4, 2, dim_feedforward=3, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(positions)
        result: Tensor = self.head(self.encoder(x).mean(1))
        return result


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(training: bool, norm_first: bool) -> None:
    tokens = torch.randint(0, 7, (3, 4))
    model = Classifier(norm_first).train(training)
    Problem(model, (tokens,), nn.CrossEntropyLoss(), torch.randint(0, 3, (3,))).check()


class VisionTransformer(nn.Module):
    """Patches, a class token and position embeddings as plain parameters, and one encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 2, stride=2)
        self.class_token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 5, 4))
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        y = self.norm1(x)
        x = x + cast(Tensor, self.attention(y, y, y, need_weights=False)[0])
        x = x + self.mlp(self.norm2(x))
        result: Tensor = self.head(x[:, 0])
        return result


# The class token and the positions belong to the model, which has no rule of its own.
@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_vision_transformer_with_a_class_token() -> None:
    classification(VisionTransformer(), (1, 4, 4)).check()
