"""Repeated passes of models that compute something else from some pass on, by the same operations.

A recording says where each tensor is found. What was one tensor when it was recorded may be two
later, an operand that was left out may be there, and a number in the code may be another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_capture import visits
from backpack_core import backpack, extend
from backpack_core.extensions import (
    KFAC,
    BatchGrad,
    ClippedSumGrad,
    DiagGGNExact,
)

N, T, D, CHANGE, PASSES = 4, 5, 6, 6, 11
late = Event()  # an attribute of a model would be seen

EXTENSIONS: dict[str, Callable[[], Any]] = {
    "gradients": BatchGrad,
    "clipped": lambda: ClippedSumGrad(0.1),
    "exact": DiagGGNExact,
    "factors": KFAC,
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FIRST", 1)
    late.clear()


class Model(nn.Module):
    """``compute(model, x, is_late)`` with layers that it may use."""

    def __init__(self, compute: Callable[[Any, Tensor, bool], Any]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, D), nn.Embedding(9, D)
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.scale = nn.Parameter(torch.randn(D))
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x, late.is_set())


def two_tables(m: Model, x: Tensor, is_late: bool) -> Tensor:
    index = x.abs().mul(7).long() % 9
    other = (index * 2) % 9 if is_late else index
    return m.c((m.words(index) + m.places(other)).tanh().mean(1))


def two_masks(m: Model, x: Tensor, is_late: bool) -> Tensor:
    mask = (torch.rand(N, D) > 0.4).double()
    other = (torch.rand(N, D) > 0.4).double() if is_late else mask
    return m.c(m.b(m.a(x) * mask) * other)


def two_conditions(m: Model, x: Tensor, is_late: bool) -> Tensor:
    is_on = torch.rand(N, D) > 0.4
    other = torch.rand(N, D) > 0.4 if is_late else is_on
    h = torch.where(is_on, m.a(x).tanh(), 0.0)
    return m.c(torch.where(other, m.b(h), 0.0))


def two_orders(m: Model, x: Tensor, is_late: bool) -> Tensor:
    order = torch.randperm(D)
    other = torch.randperm(D) if is_late else order
    return m.c(m.b(m.a(x)[:, order].tanh())[:, other])


def gate_of_input(m: Model, x: Tensor, is_late: bool) -> Tensor:
    return m.c(m.a(x) * (x.flip(1) if is_late else x))


def gate_of_itself(m: Model, x: Tensor, is_late: bool) -> Tensor:
    h = m.a(x).tanh()
    return m.c(h * (h.detach().flip(1) if is_late else h.detach()))


def two_branches(m: Model, x: Tensor, is_late: bool) -> Tensor:
    data = x.sin()
    return m.c((m.a(data) + m.b(x.cos() if is_late else data)).tanh())


def two_factors_of_a_parameter(m: Model, x: Tensor, is_late: bool) -> Tensor:
    data = x.sin()
    return m.c((m.scale * data).tanh() + m.a(x.cos() if is_late else data))


def weights_of_a_sum(m: Model, x: Tensor, is_late: bool) -> Tensor:
    """Both gradients are one tensor as long as the factor is one."""
    return m.c(torch.add(m.a(x), m.b(x.sin()), alpha=3.0 if is_late else 1.0))


def left_out_mask(m: Model, x: Tensor, is_late: bool) -> Tensor:
    h = m.words(x.abs().mul(7).long() % 9)
    mask = (torch.rand(N, T, T) > 0.3) | torch.eye(T).bool() if is_late else None
    return m.c(F.scaled_dot_product_attention(h, m.a(h), m.b(h), mask).mean(1))


def left_out_scale(m: Model, x: Tensor, is_late: bool) -> Tensor:
    h = m.words(x.abs().mul(7).long() % 9)
    scale = 0.9 if is_late else None
    return m.c(F.scaled_dot_product_attention(h, m.a(h), m.b(h), scale=scale).mean(1))


def left_out_bound(m: Model, x: Tensor, is_late: bool) -> Tensor:
    return m.c(m.a(x).clamp(min=-0.2, max=0.1 if is_late else None))


def left_out_bound_of_a_parameter(m: Model, x: Tensor, is_late: bool) -> Tensor:
    return m.c(m.a(x) * m.scale.clamp(min=-0.2, max=0.1 if is_late else None))


def left_out_weight(m: Model, x: Tensor, is_late: bool) -> Tensor:
    weight = torch.linspace(0.5, 2, D) if is_late else None
    return m.c(F.layer_norm(m.a(x), (D,), weight))


def left_out_divisor(m: Model, x: Tensor, is_late: bool) -> Tensor:
    divisor = 3 if is_late else None
    h = m.a(x).unflatten(1, (1, 2, D // 2))
    return m.c(F.avg_pool2d(h, 2, 1, padding=1, divisor_override=divisor).flatten(1)[:, :D])


def other_base(m: Model, x: Tensor, is_late: bool) -> Tensor:
    return m.c(m.a(x).sigmoid() ** (3.0 if is_late else 2.0))


def other_part(m: Model, x: Tensor, is_late: bool) -> Tensor:
    """The head of another task."""
    return m.b(m.a(x).tanh()).chunk(2, 1)[is_late]


def other_order_of_parts(m: Model, x: Tensor, is_late: bool) -> Tensor:
    first, second = m.a(x).split(D // 2, 1)
    return m.c(torch.cat([second * first.sigmoid(), second] if is_late else [first, second], 1))


def swapped_parts(m: Model, x: Tensor, is_late: bool) -> Tensor:
    first, second = m.a(x).unflatten(1, (2, D // 2)).unbind(1)
    gated = second * first.sigmoid() if is_late else first * second.sigmoid()
    return m.b(torch.cat([gated, gated.sin()], 1))[:, :3]


def other_rows(m: Model, x: Tensor, is_late: bool) -> Tensor:
    rows = m.a(x).tanh().unbind(0)
    return m.c(torch.stack([rows[0], rows[1 + is_late], rows[2 + is_late], rows[0]]))


def swapped_parts_of_a_parameter(m: Model, x: Tensor, is_late: bool) -> Tensor:
    first, second = m.scale.split(D // 2)
    both = torch.cat([second, 2 * first] if is_late else [first, 2 * second])
    return m.c(m.a(x).tanh() * both)


def other_moment(m: Model, x: Tensor, is_late: bool) -> Tensor:
    h = m.a(x).tanh()
    return m.c(h * torch.std_mean(h, 1, keepdim=True)[is_late])


def other_extreme(m: Model, x: Tensor, is_late: bool) -> Tensor:
    h = m.a(x).tanh()
    return m.c(h - torch.aminmax(h, dim=1, keepdim=True)[is_late])


COMPUTED: dict[str, Callable[[Any, Tensor, bool], Any]] = {
    function.__name__: function
    for function in (
        *(two_tables, two_masks, two_conditions, two_orders, gate_of_input, gate_of_itself),
        *(two_branches, two_factors_of_a_parameter, weights_of_a_sum),
        *(left_out_mask, left_out_scale, left_out_bound, left_out_bound_of_a_parameter),
        *(left_out_weight, left_out_divisor, other_base),
        *(other_part, other_order_of_parts, swapped_parts, other_rows),
        *(swapped_parts_of_a_parameter, other_moment, other_extreme),
    )
}
OF_TOKENS = {"two_tables", "left_out_mask", "left_out_scale"}


def drawn(name: str) -> tuple[Tensor, Tensor]:
    shape = (N, T) if name in OF_TOKENS else (N, D)
    return torch.randn(shape), torch.randint(3, (N,))


def step(model: Any, lossfunc: Any, batch: Any, make: Callable[[], Any]) -> tuple[Any, Any]:
    """Results of a pass, and how many passes repeated a recording."""
    torch.manual_seed(3)
    x, y = batch
    with backpack(make(), check="never") as block:
        lossfunc(model(x), y).backward()
    found = []
    for parameter in model.parameters():
        value = getattr(parameter, make().savefield, None)
        found += [value] if isinstance(value, Tensor) else [v for v in value or () if v is not None]
    return [v.clone() for v in found], block._history["repeated a recording"]


@pytest.mark.plans
@pytest.mark.grid(4)
@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_one_at_first_is_several_later(name: str, extension: str) -> None:
    torch.manual_seed(0)
    model, make, repeated = Model(COMPUTED[name]), EXTENSIONS[extension], 0
    ours, lossfunc = extend(copy.deepcopy(model)), extend(nn.CrossEntropyLoss())
    for number in range(PASSES):
        if number == CHANGE:
            late.set()
        batch = drawn(name)
        found, count = step(ours, lossfunc, batch, make)
        # A copy has neither plans nor recordings.
        expected, _ = step(extend(copy.deepcopy(model)), extend(nn.CrossEntropyLoss()), batch, make)
        repeated += count
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert repeated


@pytest.mark.plans
def test_what_has_changed_for_good_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many passes as the first recording took, then after twice as many."""
    monkeypatch.setattr(visits, "FIRST", 2)
    ours, lossfunc = extend(Model(weights_of_a_sum)), extend(nn.CrossEntropyLoss())
    lasted: list[int] = []
    for is_late in (False, True, False):
        (late.set if is_late else late.clear)()
        batches = [drawn("weights_of_a_sum") for _ in range(16)]
        counts = [step(ours, lossfunc, batch, DiagGGNExact)[1] for batch in batches]
        lasted.append(counts.index(1))
    # Passes that miss, the one that is recorded, and two that are compared.
    assert lasted[1:] == [2 + 1 + 2, 4 + 1 + 2], lasted


@pytest.mark.plans
@pytest.mark.parametrize("extension", ["gradients", "exact"])
@pytest.mark.parametrize("name", ["the input", "of another loss", "weight of another loss"])
def test_targets_that_are_one_tensor_with_others_at_first(name: str, extension: str) -> None:
    torch.manual_seed(0)
    make, repeated = EXTENSIONS[extension], 0
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    ours = extend(copy.deepcopy(model))
    of_input = nn.HuberLoss(delta=0.5)
    with_index, other = nn.CrossEntropyLoss(ignore_index=1), nn.CrossEntropyLoss(ignore_index=1)
    weight = torch.rand(D) + 0.5
    if name.startswith("weight"):
        with_index, other = nn.CrossEntropyLoss(weight), nn.CrossEntropyLoss(weight)
    losses = [extend(each) for each in (of_input, with_index, other)]
    for number in range(PASSES):
        x, y, is_late = torch.randn(N, D), torch.randint(D, (N,)), number >= CHANGE
        second = torch.randint(D, (N,)) if is_late else y
        noisy = x + torch.randn(N, D) if is_late else x
        if is_late and name.startswith("weight"):
            losses[2].weight = torch.rand(D) + 0.5
        found = []
        for one, its in ((ours, losses), (extend(copy.deepcopy(model)), map(copied, losses))):
            huber, first, last = its
            with backpack(make(), check="never") as block:
                out = one(noisy)
                if name == "the input":
                    huber(out, x).backward()
                else:
                    (first(out, y) + last(out.sin(), second)).backward()
            found.append([getattr(p, make().savefield).clone() for p in one.parameters()])
            repeated += block._history["repeated a recording"]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert repeated


def copied(lossfunc: nn.Module) -> nn.Module:
    return extend(copy.deepcopy(lossfunc))
