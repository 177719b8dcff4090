"""Factors that are zero when a step is recorded, and not later: what is behind them counts then."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import CaptureWarning, capture
from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import KFAC, BatchGrad, DiagGGNExact
from tests.capture.twins import Twins, same

MAKES: dict[str, Callable[[], Sequence[Any]]] = {
    "first order": lambda: [BatchGrad()],
    "curvature": lambda: [KFAC(), DiagGGNExact()],
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


class Gated(nn.Module):
    """A branch behind a gate; with ``mixes``, samples of the branch mix."""

    def __init__(self, gate: Tensor, mixes: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)
        self.mixes = mixes
        if isinstance(gate, nn.Parameter):
            self.gate = gate
        else:
            self.register_buffer("gate", gate)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.a(x)
        branch = branch - branch.mean(0) if self.mixes else branch
        result: Tensor = self.head(self.gate * torch.tanh(branch) + torch.tanh(self.b(x)))
        return result

    def open(self) -> None:
        with torch.no_grad():
            self.gate.fill_(0.7)


class Adapted(nn.Module):
    """A frozen layer with a product of two narrow ones, of which the second begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.base(x) + self.up(self.down(x))))
        return result


class Dead(Gated):
    """A branch behind units that no input switches on."""

    def __init__(self) -> None:
        super().__init__(torch.tensor(-100.0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.a(x) + self.gate) + torch.tanh(self.b(x)))
        return result


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.rand(4, 5), torch.randint(3, (4,))) for _ in range(count)]


NETS: dict[str, Callable[[], nn.Module]] = {
    "adapted": Adapted,
    "trained gate": lambda: Gated(nn.Parameter(torch.zeros(()))),
    "some units": lambda: Gated(torch.tensor([0.0, 1.0, 0.0, 0.0])),
}


@pytest.mark.parametrize("extensions", MAKES)
@pytest.mark.parametrize("net", NETS)
def test_what_begins_with_zeros(net: str, extensions: str) -> None:
    torch.manual_seed(0)
    twins = Twins(NETS[net](), MAKES[extensions]())
    twins.train(batches(12))
    for model in (twins.model, twins.other):
        if net == "some units":
            model.open()
    twins.train(batches(6))
    assert twins.replays >= 12, twins.step.report()


@pytest.mark.parametrize("extensions", MAKES)
@pytest.mark.parametrize("make", [lambda: Gated(torch.tensor(0.0)), Dead], ids=["gate", "dead"])
def test_what_opens_after_a_while(make: Callable[[], Gated], extensions: str) -> None:
    """The structure may be trusted only then; steps are recorded from then on."""
    torch.manual_seed(0)
    twins = Twins(make(), MAKES[extensions]())
    twins.train(batches(24))
    for model in (twins.model, twins.other):
        model.open()
    twins.train(batches(12))
    assert twins.replays >= 5, twins.step.report()
    assert "every pass" not in twins.step.report()


@pytest.mark.parametrize("extensions", MAKES)
def test_mixing_behind_a_gate(extensions: str) -> None:
    torch.manual_seed(0)
    twins = Twins(Gated(torch.tensor(0.0), mixes=True), MAKES[extensions]())
    twins.train(batches(24))
    assert not twins.replays
    assert "every pass is measured" in twins.step.report()
    twins.model.open()
    for batch in batches(3):
        with pytest.raises(SampleMixingError):
            twins.step(*batch)


def test_who_knows_that_samples_stay_apart() -> None:
    torch.manual_seed(0)
    models = [extend(Gated(torch.tensor(0.0))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    lossfunc = extend(nn.CrossEntropyLoss())
    step = capture(
        lambda x, y: lossfunc(models[0](x), y), models[0], lossfunc, DiagGGNExact(), check="never"
    )
    for number, (x, y) in enumerate(batches(8)):
        if number == 5:
            models[0].open(), models[1].open()
        step(x, y)
        with backpack(DiagGGNExact(), check="never"):
            lossfunc(models[1](x), y).backward()
        for ours, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
            same([ours.grad, ours.diag_ggn_exact], [right.grad, right.diag_ggn_exact])
    assert "6 replays" in step.report()


@pytest.mark.parametrize("mixes", [False, True])
def test_a_penalty_that_comes_later(mixes: bool) -> None:
    """As in a warm-up, of which the weight is an argument."""
    torch.manual_seed(0)
    model, lossfunc = extend(nn.Linear(5, 3)), extend(nn.CrossEntropyLoss())

    def function(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        out = model(x)
        penalty = out.var(0).mean() if mixes else out.square().mean()
        result: Tensor = lossfunc(out, y) + weight * penalty
        return result

    step = capture(function, model, lossfunc, BatchGrad())
    for x, y in batches(20):
        step(x, y, torch.tensor(0.0))
    for number, (x, y) in enumerate(batches(12), 1):
        model.zero_grad()
        weight = torch.tensor(0.1 * number)
        if mixes:
            with pytest.raises(SampleMixingError):
                step(x, y, weight)
        else:
            step(x, y, weight)
            torch.testing.assert_close(model.weight.grad_batch.sum(0), model.weight.grad)
    assert ("graph of" in step.report()) is not mixes, step.report()
