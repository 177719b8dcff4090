"""Private training equals a loop over samples, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_privacy import AdaptiveClipping, Clipping
from tests.privacy.problems import NETS, Plain, difference, make, noise_of, privately, run

STEPS = 10


def layers(model: nn.Module, kind: str) -> list[list[int]]:
    names = [name for name, _ in model.named_parameters()]
    if kind == "flat":
        return [[*range(len(names))]]
    homes = [name.rpartition(".")[0] if kind == "per_layer" else name for name in names]
    return [[i for i, home in enumerate(homes) if home == key] for key in dict.fromkeys(homes)]


def clip(bound: float) -> Callable[[int, Tensor], Tensor]:
    return lambda group, norm: min(torch.tensor(1.0), bound / norm)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("kind", ["flat", "per_layer", "per_parameter"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_a_loop_over_samples(net: str, kind: Any, reduction: str) -> None:
    """With noise, and with sets of samples that are sometimes empty."""
    start, data = make(net)
    plain = Plain(start, data, 0.1, 4.0)
    options = {"lossfunc": nn.CrossEntropyLoss(reduction=reduction), "noise_multiplier": 0.3}
    private, model, lossfunc = privately(net, clipping=Clipping(0.5, kind), **options)
    groups, noise = layers(start, kind), noise_of(3, 0.3 * 0.5)
    for rows, _ in run(private, model, lossfunc, STEPS):
        plain.step([[r] for r in rows], groups, clip(0.5 / sqrt(len(groups))), noise)
    assert difference(model, plain.model) < 1e-10
    assert max(record.clipped[n] for record in private.records for n in record.clipped) > 0


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("max_rows", [None, 5])
def test_users(net: str, max_rows: int | None) -> None:
    """All records of a user are clipped together, in parts of batches, too."""
    users = [0, 1, 2, 0, 3, 3, 1, 4, 5, 5, 5, 2]
    start, data = make(net)
    plain = Plain(start, data, 0.1, 2.0)
    private, model, lossfunc = privately(
        net, users=users, size=2, max_rows=max_rows, noise_multiplier=0.2
    )
    noise, batch = noise_of(3, 0.2 * 0.5), list[int]()
    for rows, is_last in run(private, model, lossfunc, STEPS):
        batch += rows
        if is_last:
            drawn = dict.fromkeys(users[row] for row in batch)
            units = [[row for row in batch if users[row] == user] for user in drawn]
            plain.step(units, layers(start, "flat"), clip(0.5), noise)
            batch = []
    assert difference(model, plain.model) < 1e-10


def test_automatic_and_a_function_of_the_user() -> None:
    for weights, plain_weight in (
        ("automatic", lambda g, norm: 0.5 / (norm + 0.01)),
        (lambda norms, c: c / (1 + norms), lambda g, norm: 0.5 / (1 + norm)),
    ):
        start, data = make("attention")
        plain = Plain(start, data, 0.1, 4.0)
        private, model, lossfunc = privately("attention", clipping=Clipping(0.5, weights=weights))
        for rows, _ in run(private, model, lossfunc, STEPS):
            plain.step([[r] for r in rows], layers(start, "flat"), plain_weight)
        assert difference(model, plain.model) < 1e-10


def test_patterns_of_names() -> None:
    start, data = make("images")
    plain = Plain(start, data, 0.1, 4.0)
    bounds = {"0.*": 0.1, "*.bias": 0.2, "*": 0.7}
    private, model, lossfunc = privately("images", max_norm=bounds)
    names = [name for name, _ in start.named_parameters()]
    groups = [[0, 1], [3, 5], [2, 4]]
    assert names[3].endswith("bias")
    weights = [*bounds.values()]
    for rows, _ in run(private, model, lossfunc, STEPS):
        plain.step([[r] for r in rows], groups, lambda g, norm: clip(weights[g])(g, norm))
    assert difference(model, plain.model) < 1e-10
    assert private.clipping.sensitivity == pytest.approx(sqrt(0.01 + 0.04 + 0.49))


@pytest.mark.parametrize("kind", ["flat", "per_layer"])
def test_adaptive_bounds(kind: Any) -> None:
    start, data = make("perceptron")
    plain = Plain(start, data, 0.1, 4.0)
    clipping = AdaptiveClipping(0.5, kind, quantile=0.6, rate=0.3, count_noise=3.0)
    private, model, lossfunc = privately(clipping=clipping, noise_multiplier=0.4)
    groups = layers(start, kind)
    bounds = [0.5 / sqrt(len(groups))] * len(groups)
    larger = (0.4**-2 - len(groups) * 6.0**-2) ** -0.5
    draw = noise_of(3, 1.0)
    for rows, _ in run(private, model, lossfunc, STEPS):
        sensitivity = sqrt(sum(b * b for b in bounds))
        norms = plain.step(
            [[r] for r in rows],
            groups,
            lambda g, norm: clip(bounds[g])(g, norm),
            lambda like, s=larger * sensitivity: s * draw(like),
        )
        counts = draw(torch.empty(len(groups))) * 3.0
        for g, found in enumerate(norms):
            share = (sum((n <= bounds[g]).item() - 0.5 for n in found) + counts[g].item()) / 4 + 0.5
            bounds[g] *= exp(-0.3 * (share - 0.6))
    assert difference(model, plain.model) < 1e-10
    assert [*clipping.bounds.values()] == pytest.approx(bounds)
    assert bounds[0] != 0.5
