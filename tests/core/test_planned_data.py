"""Plans hold while the data of modules are of the same samples: a copy of a model has no plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import BackpackError, SampleMixingError
from backpack_core.extensions import KFAC, BatchGrad, BatchL2Grad, DiagGGNExact

N, T, D, CHANGE, PASSES = 4, 6, 5, 5, 12
EXTENSIONS: dict[str, Callable[[], Any]] = {
    "gradients": BatchGrad,
    "norms": BatchL2Grad,
    "exact": DiagGGNExact,
    "factors": KFAC,
}
Compute = Callable[[Any, Tensor, int], Tensor]


class Model(nn.Module):
    """``compute(model, x, number)``, with layers that it may use."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.words, self.a, self.c = nn.Embedding(9, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.held = nn.Linear(D, 1)  # never called: operations use its weight
        self.register_buffer("grid", torch.randn(N, D))
        self.compute = compute

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.compute(self, x, number)


def order_of(number: int) -> Tensor:
    return torch.arange(N) if number < CHANGE else torch.arange(N).roll(number % 3)


def mask_of(number: int) -> Tensor:
    lengths = [3, 3, 3, 3] if number < CHANGE else [[6, 2, 2, 2], [3] * 4, [1, 5, 4, 2]][number % 3]
    return torch.arange(T) < torch.tensor(lengths)[:, None]


def picked(m: Any, x: Tensor, number: int) -> Tensor:
    """Tokens of several lengths, which are as many as before."""
    return m.c(m.a(x[mask_of(number)]).tanh())


def picked_by_operations(m: Any, x: Tensor, number: int) -> Tensor:
    return m.c((F.linear(x[mask_of(number)], m.a.weight) * m.held.weight).tanh())


def picked_words(m: Any, x: Tensor, number: int) -> Tensor:
    ids = x[..., 0].abs().mul(99).long() % 9
    return m.c(m.words(ids[mask_of(number)]).tanh())


def ordered(m: Any, x: Tensor, number: int) -> Tensor:
    return m.c(m.a(x[:, 0][order_of(number)]).tanh())


def ordered_by_operations(m: Any, x: Tensor, number: int) -> Tensor:
    return m.c((x[:, 0][order_of(number)] * m.held.weight).tanh())


def ordered_leaf(m: Any, x: Tensor, number: int) -> Tensor:
    return m.c((x[:, 0][order_of(number)].clone().requires_grad_().sin() * 2) @ m.a.weight)


def time_first(m: Any, x: Tensor, number: int) -> Tensor:
    rows = x if number < CHANGE else x.transpose(0, 1)
    return m.c(m.a(rows.reshape(-1, D).clone()).tanh())


def patches(m: Any, x: Tensor, number: int) -> Tensor:
    """Entries that are moved by a copy, of the same sample at first."""
    rows = x if number < CHANGE or number % 2 else x.roll(1, 0)
    return m.c(m.a(rows.view(N, 2, 3, D).transpose(1, 2).reshape(N, T, D)).tanh().mean(1))


def buffer_first(m: Any, x: Tensor, number: int) -> Tensor:
    return m.c((m.a(m.grid if number < CHANGE else x[:, 0] * 1) + x[:, 1]).tanh())


def constant_first(m: Any, x: Tensor, number: int) -> Tensor:
    table = torch.linspace(0, 1, N * D).reshape(N, D)
    return m.c((m.a(table if number < CHANGE else x[:, 0] * 1) + x[:, 1]).tanh())


def table_first(m: Any, x: Tensor, number: int) -> Tensor:
    """What is a table of all samples at first mixes them later."""
    grid = m.grid if number < CHANGE else x[:, 0] * 1
    return m.c(x[:, 1, :N] @ m.a(grid).tanh())


def last_of_sequences(m: Any, x: Tensor, number: int) -> Tensor:
    """Time first: the layer is opened, and an index picks from what is inside of it."""
    h = m.a(m.words(x[..., 0].abs().mul(99).long() % 9).transpose(0, 1)).tanh()
    return m.c(h[torch.randint(T, (N,)), torch.arange(N)])


def gathered_from_sequences(m: Any, x: Tensor, number: int) -> Tensor:
    h = m.a(m.words(x[..., 0].abs().mul(99).long() % 9).transpose(0, 1)).tanh()
    return m.c(h.gather(0, torch.randint(T, (1, N, 1)).expand(1, N, D))[0])


COMPUTED: dict[str, Compute] = {
    function.__name__: function
    for function in (
        *(picked, picked_by_operations, picked_words, ordered, ordered_by_operations),
        *(ordered_leaf, time_first, patches, buffer_first, constant_first, table_first),
        *(last_of_sequences, gathered_from_sequences),
    )
}


def outcome(model: Any, x: Tensor, number: int, extension: Any) -> Any:
    """The results of a pass, or the kind of its error."""
    torch.manual_seed(number)
    out = model(x, number)
    torch.manual_seed(number)
    loss = extend(nn.CrossEntropyLoss())(out, torch.randint(3, (len(out),)))
    for parameter in model.parameters():
        vars(parameter).pop(extension.savefield, None)
    try:
        with backpack(extension):
            loss.backward()
    except BackpackError as error:
        return type(error)
    return [getattr(parameter, extension.savefield, None) for parameter in model.parameters()]


@pytest.mark.grid(4)
@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize("name", COMPUTED)
def test_data_are_looked_at_again(name: str, extension: str) -> None:
    torch.manual_seed(0)
    model, make = Model(COMPUTED[name]), EXTENSIONS[extension]
    ours = extend(copy.deepcopy(model))
    for number in range(PASSES):
        x = torch.randn(N, T, D)
        found = outcome(ours, x, number, make())
        expected = outcome(extend(copy.deepcopy(model)), x, number, make())
        if isinstance(expected, type) or isinstance(found, type):
            assert found is expected, number
            continue
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compute", [ordered, ordered_by_operations])
def test_samples_in_another_order_are_refused(compute: Compute) -> None:
    """Their targets may be in the order of the model's input, whoever meets the data first."""
    model, x = extend(Model(compute)), torch.randn(N, T, D)
    assert outcome(model, x, CHANGE + 2, BatchGrad()) is SampleMixingError


@pytest.mark.plans
def test_patches_take_a_plan() -> None:
    """Later passes compare entries with where they came from, and search for nothing."""
    torch.manual_seed(0)
    model, planned = extend(Model(patches)), 0
    for _ in range(8):
        block = backpack(BatchGrad())
        loss = extend(nn.CrossEntropyLoss())(model(torch.randn(N, T, D), 0), torch.arange(N) % 3)
        with block:
            loss.backward()
        planned += block._history["planned before"]
    assert planned
