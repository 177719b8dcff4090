"""Experts behind a frozen trunk: tokens are sorted by expert before the first trained layer.

Nothing is recorded there, so that only behind the experts an index says whose tokens are whose. An
expert may receive as many tokens as there are samples, or a multiple of that.
"""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchGrad
from tests import oracle

D, C, EXPERTS = 4, 2, 3


class Routed(nn.Module):
    """A frozen table, a layer for each expert, and one for all.

    Attributes:
        way: How rows of experts are put back.
        is_recorded: Whether the graph begins before tokens are sorted.
    """

    way = "joined"
    is_recorded = False

    def __init__(self, route: Tensor, is_merged: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, D).requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))
        self.head = nn.Linear(D, C)
        self.route, self.is_merged = route, is_merged

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        x = x.requires_grad_() if self.is_recorded else x
        order, counts = self.route.argsort(stable=True), self.route.bincount(minlength=EXPERTS)
        tokens = x.flatten(0, 1)
        if self.way in ("joined", "summed"):
            parts = zip(self.experts, tokens[order].split(counts.tolist()), strict=True)
            h = torch.cat([expert(part) for expert, part in parts])
            is_joined, zeros = self.way == "joined", torch.zeros_like(tokens)
            h = h[order.argsort()] if is_joined else zeros.index_add(0, order, 0.7 * h)
        else:
            h = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                own = (self.route == number).nonzero().flatten()
                if self.way == "added":
                    h.index_add_(0, own, expert(tokens[own]))
                else:
                    h[own] = expert(tokens[own])
        found: Tensor = self.head(torch.tanh(h.view_as(x)))
        return found.flatten(0, 1) if self.is_merged else found


def _check(
    samples: int,
    length: int,
    route: list[int],
    told: list[int] | None,
    merged: bool,
    **settings: Any,
) -> None:
    net: Any = Routed(torch.tensor(route), merged).double()
    vars(net).update(settings)
    words, places = torch.randint(5, (samples, length)), torch.arange(samples)
    y = torch.randn(samples * length, C).double()
    y = y if merged else y.view(samples, length, C)
    owners = places if told is None else torch.tensor(told)
    rows = owners.repeat_interleave(length) if merged else owners
    parameters = [p for p in net.parameters() if p.requires_grad]
    expected = []
    for n in range(int(owners.max()) + 1):
        own = (net(words) - y)[rows == n].square().sum()
        expected.append(torch.autograd.grad(own, parameters, allow_unused=True))
    extend(net)
    with backpack(BatchGrad(), samples=told):
        extend(nn.MSELoss(reduction="sum"))(net(words), y).backward()
    for parameter, *gradients in zip(parameters, *expected, strict=True):
        full = [torch.zeros_like(parameter) if g is None else g for g in gradients]
        # A layer that no token reaches has no result.
        zeros = torch.zeros(len(full), *parameter.shape, dtype=parameter.dtype)
        oracle.assert_close(vars(parameter).get("grad_batch", zeros), torch.stack(full))


def _drawn(random: Random) -> tuple[int, int, list[int]]:
    """Numbers of samples and of tokens for each, and the expert of every token."""
    samples, length = random.randint(2, 4), random.randint(1, 3)
    return samples, length, random.choices(range(EXPERTS), k=samples * length)


# By expert, the numbers of tokens among which some are as many as samples, or twice as many.
ROUTES = {
    "a multiple": (2, 3, [1, 1, 2, 1, 2, 1]),
    "one for each": (3, 2, [0, 1, 1, 1, 0, 2]),
    "one for each, and a multiple": (2, 3, [0, 2, 0, 0, 2, 0]),
    "only the last": (4, 3, [2, 0, 2, 2, 1, 2, 2, 0, 1, 2, 2, 2]),
    "none": (3, 3, [0, 1, 1, 1, 2, 0, 2, 1, 1]),
}


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("name", ROUTES)
def test_tokens_of_experts(name: str, is_told: bool, merged: bool) -> None:
    samples, length, route = ROUTES[name]
    _check(samples, length, route, [*range(samples)][::-1] if is_told else None, merged)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("way", ["joined", "summed", "added", "written"])
@pytest.mark.parametrize("seed", range(30))
def test_any_routes(seed: int, way: str, merged: bool) -> None:
    """If experts have as many tokens as there are samples, their order may be anything."""
    random = Random(seed)
    samples, length, route = _drawn(random)
    told = random.choice([None, random.choices(range(samples), k=samples)])
    counts = {route.count(expert) for expert in range(EXPERTS)} - {0}
    is_like = samples in counts if told is None else any(not n % samples for n in counts)
    is_like |= told is not None and way == "summed" and length == 1  # as many rows as were told
    with contextlib.suppress(*[SampleMixingError] if is_like else []):
        _check(samples, length, route, told, merged, way=way)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("way", ["joined", "summed", "added", "written"])
@pytest.mark.parametrize("seed", range(20))
def test_routes_that_are_recorded(seed: int, way: str, merged: bool) -> None:
    """Some experts have no token, and some samples none at an expert."""
    _check(*_drawn(Random(seed)), None, merged, way=way, is_recorded=True)
