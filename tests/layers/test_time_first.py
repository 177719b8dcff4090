"""Recurrent layers with the time in front, beside equal ones with the samples in front."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import BackpackError
from backpack_core.extensions import (
    KFLR,
    BatchDiagGGNExact,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    Jacobians,
)
from tests import oracle

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep": {"num_layers": 2},
    "both ways": {"bidirectional": True},
}
ENDS = ["last", "tokens", "mean", "state", "steps and state"]
EXTENSIONS = {
    "individual": (BatchGrad, BatchL2Grad),
    "columns": (DiagGGNExact, BatchDiagGGNExact, Jacobians),
}


class Sequences(nn.Module):
    """A layer, a recurrent layer, and a head; the model receives the samples in front."""

    def __init__(self, kind: str, end: str, option: str, is_first: bool) -> None:
        super().__init__()
        self.end, self.is_first = end, is_first
        self.embed = nn.Linear(3, 4)
        self.cell = KINDS[kind](4, 5, batch_first=is_first, **OPTIONS[option])
        self.head = nn.Linear(10 if option == "both ways" else 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        out, states = self.cell(h if self.is_first else h.transpose(0, 1))
        out = out if self.is_first else out.transpose(0, 1)
        state = states[0] if isinstance(states, tuple) else states
        last = torch.cat([*state[-2:]], -1) if self.cell.bidirectional else state[-1]
        if self.end.endswith("state"):
            return self.head(last if self.end == "state" else last + torch.tanh(out[:, 0]))
        if self.end == "tokens":
            return self.head(out).flatten(0, 1)
        found = {
            "last": out[:, -1],
            "mean": torch.tanh(out).mean(1),
            "both": out[:, 0] + out.sum(1),
        }
        return self.head(found[self.end])


def _twins(kind: str, end: str, option: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(0)
    models = [Sequences(kind, end, option, is_first).double() for is_first in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    return extend(models[0]), extend(models[1]), extend(nn.CrossEntropyLoss())


def _results(model: nn.Module, loss: Tensor, *extensions: Any, **options: Any) -> list[Any]:
    with backpack(*extensions, **options):
        loss.backward()
    own = [[getattr(p, e.savefield) for e in extensions] for p in model.parameters()]
    return [value for found in own for value in found]


@pytest.mark.grid(12)
@pytest.mark.parametrize("samples", [None, [1, 0]], ids=["all", "some"])
@pytest.mark.parametrize(("count", "steps"), [(3, 4), (4, 4), (4, 1), (1, 4)])
@pytest.mark.parametrize("extensions", EXTENSIONS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_the_layout(
    kind: str,
    option: str,
    end: str,
    extensions: str,
    count: int,
    steps: int,
    samples: list[int] | None,
) -> None:
    """In several passes, of which later ones go by plans and recordings."""
    if samples is not None and count < 2:
        pytest.skip("there is one sample")
    first, other, lossfunc = _twins(kind, end, option)
    for number in range(12):
        x = torch.randn(count, steps + number % 2 * (count > 1), 3, dtype=torch.float64)
        y = torch.randint(3, (x[..., 0].numel() if end == "tokens" else count,))
        made = [[e(subsampling=samples) for e in EXTENSIONS[extensions]] for _ in range(2)]
        expected = _results(first, lossfunc(first(x), y), *made[0])
        found = _results(other, lossfunc(other(x), y), *made[1])
        for one, right in zip(found, expected, strict=True):
            oracle.assert_close(one, right)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_rules_take_the_time_in_front(kind: str, end: str) -> None:
    """Kronecker factors do not exist for layers that are read at their operations."""
    first, other, lossfunc = _twins(kind, end, "plain")
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    y = torch.randint(3, (12 if end == "tokens" else 3,))
    expected = _results(first, lossfunc(first(x), y), KFLR())
    for one, right in zip(_results(other, lossfunc(other(x), y), KFLR()), expected, strict=True):
        for factor, own in zip(one, right, strict=True):
            oracle.assert_close(factor, own)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_receives_the_time_in_front(kind: str) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = KINDS[kind](3, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.cell(x)[0][-1])

    torch.manual_seed(0)
    model, lossfunc = extend(Whole().double(), batch_axis=1), extend(nn.CrossEntropyLoss())
    for count, steps in ((3, 4), (4, 4), (5, 2)):
        x, y = torch.randn(steps, count, 3, dtype=torch.float64), torch.randint(3, (count,))
        found = _results(model, lossfunc(model(x), y), BatchGrad())
        parameters = [*model.parameters()]
        for n in range(count):
            loss = nn.functional.cross_entropy(model(x[:, n : n + 1]), y[n : n + 1]) / count
            for value, right in zip(found, torch.autograd.grad(loss, parameters), strict=True):
                oracle.assert_close(value[n], right)


@pytest.mark.parametrize("length", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_are_taken_for_steps_influence_each_other(kind: str, length: int) -> None:
    """The layer was built for the time in front, and gets the samples there."""

    class Mistaken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Linear(3, 4), KINDS[kind](4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.cell(self.embed(x))[0][:, -1])

    model, lossfunc = extend(Mistaken()), extend(nn.CrossEntropyLoss())
    for extension in (BatchGrad(), DiagGGNExact()):
        loss = lossfunc(model(torch.randn(4, length, 3)), torch.randint(3, (4,)))
        with pytest.raises(BackpackError), backpack(extension):
            loss.backward()
