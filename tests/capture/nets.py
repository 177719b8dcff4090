"""Small nets of all kinds, with what draws a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + torch.nn.functional.gelu(self.a(x))
        return self.c(h + torch.tanh(self.b(h)) * 0.5)


class Last(nn.Module):
    """The last step of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Slopes(nn.Module):
    """A net and its derivative along all inputs, in which weights are used transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        value = torch.tanh(self.a(x))
        slope = (1 - value * value) * (torch.ones_like(x) @ self.a.weight.T)
        return self.b(value) + slope @ self.b.weight.T


class Tied(nn.Module):
    """A token model whose head is its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.table(x)))).transpose(1, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(12, 3))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.running_mean.uniform_(-1, 1)
    return nn.Sequential(nn.Linear(5, 4), norm, nn.Tanh(), nn.Linear(4, 3)).eval()


class Net(NamedTuple):
    make: Callable[[], nn.Module]
    draw: Callable[[int], Batch]


def _of(*shape: int) -> Callable[[int], Batch]:
    return lambda n: (torch.rand(n, *shape), torch.randint(3, (n,)))


NETS: dict[str, Net] = {
    "mlp": Net(mlp, _of(5)),
    "residual": Net(Residual, _of(5)),
    "slopes": Net(Slopes, _of(5)),
    "cnn": Net(cnn, _of(1, 6, 6)),
    "dropout": Net(dropout, _of(5)),
    "embedding": Net(embedding, lambda n: (torch.randint(7, (n, 4)), torch.randint(3, (n,)))),
    "gru": Net(lambda: Last(nn.GRU(3, 4, batch_first=True)), _of(5, 3)),
    "lstm": Net(lambda: Last(nn.LSTM(3, 4, batch_first=True)), _of(5, 3)),
    "encoder": Net(Encoder, _of(4, 8)),
    "tied": Net(Tied, lambda n: (torch.randint(6, (n, 5)), torch.randint(6, (n, 5)))),
    "frozen": Net(frozen, _of(5)),
    "batch_norm": Net(batch_norm, _of(5)),
}
