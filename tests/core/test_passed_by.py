"""Calls at which nothing happens: let go of without a visit, once the structure is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.engine.traversal import Traversal
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_operations.order import calls_at


class Tabled(nn.Module):
    """Rows of a table have no samples: what is sent there is kept apart on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(4, 3), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.table(torch.arange(4)))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2), nn.Tanh()).double()


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    found: list[type] = []
    visit = Traversal.visit

    def note(self: Traversal, lane: int, site: Any, view: Any) -> None:
        found.append(type(site.call.module))
        visit(self, lane, site, view)

    monkeypatch.setattr(Traversal, "visit", note)
    return found


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """By autograd, of one sample after the other, for the mean of squares."""
    parts = [(out := model(x))[n].square().sum() / out.numel() for n in range(len(x))]
    named = dict(model.named_parameters())
    each = [torch.autograd.grad(part, [*named.values()]) for part in parts]
    return dict(zip(named, map(torch.stack, zip(*each, strict=True)), strict=True))


def passes(
    model: nn.Module,
    *extensions: Any,
    count: int = 3,
    shape: tuple[int, ...] = (5, 3),
    **options: Any,
) -> Tensor:
    """The passes 1, 2 and 4 of a structure are measured, the third is not."""
    loss, x = extend(nn.MSELoss()), torch.randn(shape, dtype=torch.float64)
    for _ in range(count):
        model.zero_grad()
        out = model(x)
        with backpack(*extensions, **options):
            loss(out, torch.zeros_like(out)).backward()
    return x


def test_activations_and_losses_are_passed_by_where_nothing_travels(visited: list[type]) -> None:
    model = extend(chain())
    passes(model, BatchGrad(), count=2)
    assert nn.Sigmoid in visited  # these are measured
    visited.clear()
    x = passes(model, BatchGrad(), count=1)
    assert visited == [nn.Linear, nn.Linear]
    for name, expected in gradients(model, x).items():
        torch.testing.assert_close(model.get_parameter(name).grad_batch, expected)


def test_what_it_holds_is_freed() -> None:
    model, loss = extend(chain()), extend(nn.MSELoss())
    x = passes(model, BatchGrad(), count=2)
    out = model(x)
    with backpack(BatchGrad()):
        loss(out, torch.zeros_like(out)).backward()
    (call,) = calls_at(out.grad_fn)
    assert type(call.module) is nn.Tanh
    assert call.is_released


def test_all_are_visited_where_something_travels(visited: list[type]) -> None:
    passes(extend(chain()), DiagGGNExact())
    assert visited[-5:] == [nn.MSELoss, nn.Tanh, nn.Linear, nn.Sigmoid, nn.Linear]


def test_all_are_visited_where_samples_are_kept_apart() -> None:
    model = extend(Tabled().double())
    x = passes(model, BatchGrad(), shape=(5, 4, 3))
    expected = gradients(model, x)
    torch.testing.assert_close(model.table.weight.grad_batch, expected["table.weight"])


def test_whoever_listens_hears_of_all() -> None:
    heard: list[type] = []
    passes(extend(chain()), BatchGrad(), extension_hook=lambda module: heard.append(type(module)))
    assert heard.count(nn.Sigmoid) == 3


def test_the_graph_may_be_kept() -> None:
    model, loss = extend(chain()), extend(nn.MSELoss())
    passes(model, BatchGrad())
    out = model(torch.randn(5, 3, dtype=torch.float64))
    value = loss(out, torch.zeros_like(out))
    with backpack(BatchGrad(), retain_graph=True):
        value.backward(retain_graph=True)
    first = [p.grad_batch for p in model.parameters()]
    with backpack(DiagGGNExact(), BatchGrad()):
        value.backward()
    for parameter, before in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad_batch, before)
