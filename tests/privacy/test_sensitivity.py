"""No unit of a batch changes the sum by more than the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from backpack_privacy import Clipping, make_private
from backpack_privacy.randomness import Seeded
from backpack_privacy.sampling import Units
from tests.privacy.problems import NETS, loader_of, make, own_gradients, privately

Backward = Callable[[Sequence[int]], None]


def total_of(
    private: Any, backward: Backward, units: Units, chosen: list[int], most: Any
) -> Tensor:
    """The clipped sum over some units, in parts of at most so many rows."""
    private.begins()
    for draw in units.parts(chosen, most, Seeded(0)):
        private.draws(draw)
        with private:
            backward(draw.rows)
    return torch.cat([found.flatten() for found in private._sums.totals().values()])


def changes_of(
    private: Any,
    backward: Backward,
    units: Units,
    left_out: Sequence[int] | None = None,
    most: int | None = None,
) -> list[float]:
    """By how much the sum changes without each unit, or each of some."""
    every = [*range(units.count)]
    whole = total_of(private, backward, units, every, most)
    return [
        float((whole - total_of(private, backward, units, every[:n] + every[n + 1 :], most)).norm())
        for n in left_out or every
    ]


class Twice(nn.Module):
    """A layer that runs twice, with a parameter that a function uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(torch.tanh(self.layer(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


class Convolution(nn.Module):
    """Over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(6, 6, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


BLOCKS: list[Callable[[], nn.Module]] = [
    *(lambda: nn.Linear(6, 6), nn.Tanh, nn.GELU, lambda: nn.LayerNorm(6), lambda: nn.RMSNorm(6)),
    *(Twice, Attention, Convolution),
]


def random_net(choose: Random) -> nn.Module:
    """Some blocks, whose weights are of very different sizes."""
    blocks = [choose.choice(BLOCKS)() for _ in range(choose.randint(1, 6))]
    model = nn.Sequential(*blocks, Pooled(), nn.Linear(6, 3))
    for p in model.parameters():
        p.data *= 10 ** choose.uniform(-2, 1)
    return model


@pytest.mark.parametrize("seed", range(24))
def test_random_nets_users_and_parts(seed: int) -> None:
    """Each user is left out in turn; some have records a thousand times as large as others'."""
    torch.manual_seed(seed)
    choose = Random(seed)
    model, bound = random_net(choose), 10 ** choose.uniform(-4, 0)
    x = torch.randn(10, 5, 6) * 10 ** torch.empty(10, 1, 1).uniform_(-1.5, 1.5)
    y = torch.randint(3, (10,))
    users = [choose.randrange(5) for _ in range(10)] if seed % 2 else None
    kind: Any = choose.choice(["flat", "per_layer", "per_parameter", "automatic"])
    clipping = Clipping(bound, weights=kind) if kind == "automatic" else Clipping(bound, kind)
    lossfunc = nn.CrossEntropyLoss(reduction=choose.choice(["mean", "sum"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = loader_of(TensorDataset(x, y), 2)
    options: Any = {"noise_multiplier": 0.0, "clipping": clipping, "users": users, "checks": 0}
    private = make_private(model, lossfunc, optimizer, loader, **options)

    def backward(rows: Sequence[int]) -> None:
        lossfunc(model(x[[*rows]]), y[[*rows]]).backward()

    most = choose.choice([None, 3])
    changes = changes_of(private, backward, Units(10, users), most=most)
    assert 0 < max(changes) <= bound * (1 + 1e-9)
    if kind == "automatic":
        assert min(changes) < bound


@pytest.mark.parametrize("kind", ["flat", "per_layer", "per_parameter", "automatic"])
@pytest.mark.parametrize("net", NETS)
def test_no_sample_changes_the_sum_by_more_than_the_bound(net: str, kind: Any) -> None:
    """Each one is left out in turn; gradients are a thousand times as large as the bound."""
    clipping = Clipping(1e-3, weights=kind) if kind == "automatic" else Clipping(1e-3, kind)
    private, model, lossfunc = privately(
        net, clipping=clipping, size=12, lossfunc=nn.CrossEntropyLoss(reduction="sum")
    )
    _, data = make(net)

    def backward(rows: Sequence[int]) -> None:
        lossfunc(model(data.tensors[0][rows]), data.tensors[1][rows]).backward()

    changes = changes_of(private, backward, Units(12))
    assert max(changes) <= 1e-3 * (1 + 1e-9)
    norms = own_gradients(model, [[n] for n in range(12)], data)
    if kind == "flat" and all(torch.cat([g.flatten() for g in own]).norm() > 1e-3 for own in norms):
        assert min(changes) > 0.9e-3


def test_no_sample_changes_a_sum_in_half_precision_by_more_than_the_bound() -> None:
    """With a mean, the rounding of alike gradients would add up to 1.7 of the bound."""
    torch.manual_seed(0)
    count, bound = 1024, 0.1
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 10)).float()
    for p in model.parameters():
        p.data *= 0.1
    x = (torch.randn(1, 64) + 0.1 * torch.randn(count, 64)).float()
    data = TensorDataset(x, torch.zeros(count).long())
    lossfunc, optimizer = nn.CrossEntropyLoss(reduction="sum"), torch.optim.SGD(model.parameters())
    options: Any = {"noise_multiplier": 0.0, "max_norm": bound, "checks": 0}
    private = make_private(model, lossfunc, optimizer, loader_of(data, count), **options)

    def backward(rows: Sequence[int]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = lossfunc(model(x[rows]), data.tensors[1][rows])
        loss.backward()

    changes = changes_of(private, backward, Units(count), [0, 1, 2])
    assert 0.9 * bound < max(changes) <= bound * (1 + 1e-3)


class Difference(nn.Module):
    """Two uses of a layer, or of each of its positions, which nearly cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layer(x).unbind(1)
        return first - second


@pytest.mark.parametrize("seed", range(5))
def test_no_sample_exceeds_the_bound_where_positions_cancel(seed: int) -> None:
    """Norms by inner products lose what is left in rounding."""
    torch.manual_seed(seed)
    model, start = Difference().float(), torch.randn(8, 1, 32)
    x = (start + 1e-4 * torch.randn(8, 2, 32)).float()
    data, optimizer = TensorDataset(x), torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(
        model, torch.sum, optimizer, loader_of(data, 8), normaliser=None, seed=0, checks=0,
        noise_multiplier=0.0, max_norm=1e-4, sampling="shuffled", max_rows=1,
    )  # fmt: skip
    before, sums = model.layer.weight.detach().clone(), list[Tensor]()
    for (rows,) in private.loader:
        private.step(model(rows).sum())
        (whole,) = private._sums.totals().values()
        if not private.steps:
            sums.append(whole.clone())
    sums.append(8 * (before - model.layer.weight.detach()))
    sums = [torch.zeros_like(before), *sums]
    assert all(float((b - a).norm()) < 1.05e-4 for a, b in pairwise(sums))
