"""Nets, data and a plain private training by a loop over samples, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from backpack_privacy import make_private
from backpack_privacy.randomness import Seeded

COUNT = 12


class Tied(nn.Module):
    """An embedding that is the output layer, too, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for _ in range(2):
            hidden = hidden + torch.tanh(self.layer(hidden))
        return F.linear(self.norm(hidden).mean(1), self.tokens.weight)


def images() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


class Attends(nn.Module):
    """Attention with one head, with a parameter that a function uses."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x * self.scale).unsqueeze(1).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1).mean(1))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "perceptron": (perceptron, lambda: torch.randn(COUNT, 5), 3),
    "images": (images, lambda: torch.randn(COUNT, 1, 6, 6), 3),
    "tied": (Tied, lambda: torch.randint(7, (COUNT, 4)), 7),
    "attention": (Attends, lambda: torch.randn(COUNT, 4, 6), 3),
}


def make(net: str, seed: int = 0) -> tuple[nn.Module, TensorDataset]:
    """A net and its data."""
    torch.manual_seed(seed)
    model, inputs, classes = NETS[net]
    return model(), TensorDataset(inputs(), torch.randint(classes, (COUNT,)))


def loader_of(data: Any, size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=size, **options)


def privately(net: str = "perceptron", **options: Any) -> tuple[Any, nn.Module, Any]:
    """A private training with a seed, its model and its loss."""
    model, data = make(net)
    lossfunc = options.pop("lossfunc", None) or nn.CrossEntropyLoss()
    optimizer = options.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))(model.parameters())
    size = options.pop("size", 4)
    settings: dict[str, Any] = {"noise_multiplier": 0.0, "seed": 3, **options}
    if "clipping" not in settings:
        settings.setdefault("max_norm", 0.5)
    loader = loader_of(data, size)
    return make_private(model, lossfunc, optimizer, loader, **settings), model, lossfunc


def run(private: Any, model: Any, lossfunc: Any, steps: int) -> list[tuple[list[int], bool]]:
    """Train for so many steps; which rows each part had, and whether a step followed."""
    seen: list[tuple[list[int], bool]] = []
    draws = private.draws

    def watched(draw: Any) -> None:
        seen.append(([*draw.rows], draw.is_last))
        draws(draw)

    private.loader._draws = watched
    while private.steps < steps:
        for inputs, targets in private.loader:
            private.step(lossfunc(model(inputs), targets))
            if private.steps >= steps:
                break
    return seen


def own_gradients(
    model: nn.Module, groups: Sequence[Sequence[int]], data: Any
) -> list[list[Tensor]]:
    """Of each unit: the gradients of the sum of its records' losses."""
    inputs, targets = data.tensors
    found = []
    for rows in groups:
        loss = sum(
            F.cross_entropy(model(inputs[r : r + 1]), targets[r : r + 1], reduction="sum")
            for r in rows
        )
        grads = torch.autograd.grad(loss, [*model.parameters()])
        found.append([grad.detach() for grad in grads])
    return found


class Plain:
    """The same training by a loop over samples."""

    def __init__(self, model: nn.Module, data: Any, lr: float, expected: float) -> None:
        self.model, self.data, self.expected = deepcopy(model), data, expected
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def step(
        self,
        units: Sequence[Sequence[int]],
        groups: Sequence[Sequence[int]],
        weight: Callable[[int, Tensor], Tensor],
        noise: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> list[list[Tensor]]:
        """One step; the norms of each group.

        Args:
            units: The records of each unit of the batch.
            groups: Numbers of parameters that are clipped together.
            weight: Of the number of a group and a norm, the factor.
            noise: What is added to a sum.
        """
        totals = [torch.zeros_like(p) for p in self.model.parameters()]
        norms: list[list[Tensor]] = [[] for _ in groups]
        for grads in own_gradients(self.model, units, self.data):
            for number, group in enumerate(groups):
                norm = torch.cat([grads[place].flatten() for place in group]).norm()
                norms[number].append(norm)
                for place in group:
                    totals[place] += weight(number, norm) * grads[place]
        for p, total in zip(self.model.parameters(), totals, strict=True):
            p.grad = (total + noise(total)) / self.expected
        self.optimizer.step()
        return norms


def difference(first: nn.Module, second: nn.Module) -> float:
    """The largest difference of two models' parameters."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def noise_of(seed: int, deviation: float) -> Callable[[Tensor], Tensor]:
    """What a private training with this seed adds."""
    source = Seeded(seed)
    return lambda like: deviation * source.normal(like)
