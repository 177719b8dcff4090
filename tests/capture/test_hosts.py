"""What takes captured steps (data sets, optimizers) gives the numbers of the engine, bit by bit."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import CapturedStep, HostedStep, capture
from backpack_core import extend
from backpack_core.errors import UsageError
from backpack_core.extensions import EKFAC as Corrected
from backpack_core.extensions import KFAC as Factors
from backpack_core.extensions import (
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    Variance,
)
from backpack_data import Weights, accumulate, combined
from backpack_optimizers import EKFAC, KFAC, LevenbergMarquardt
from tests.capture.nets import mlp
from tests.capture.twins import same


def mlp_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mlp()


def batches(sizes: list[int], classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [(torch.rand(n, 5), torch.randint(classes, (n,))) for n in sizes]


def values(step: Any) -> list[CapturedStep]:
    return step._steps if isinstance(step, HostedStep) else [step]


def replays(step: Any) -> int:
    forms = [f for s in values(step) for fs in s._forms.values() for f in fs]
    return sum(f.graph.replays for f in forms if f.graph)


# Over data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_over_data(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[CapturedStep]()
    before = CapturedStep.__init__

    def noted(self: CapturedStep, *args: Any) -> None:
        made.append(self)
        before(self, *args)

    monkeypatch.setattr(CapturedStep, "__init__", noted)
    weight = torch.tensor([1.0, 2.0, 0.5])
    lossfunc = nn.CrossEntropyLoss(weight, ignore_index=2, reduction=reduction)
    data = batches([4] * 8 + [3])
    extensions = [BatchL2Grad(), Variance(), DiagGGNExact(), Corrected()]
    model, found = mlp(), []
    for way in (False, True):
        torch.manual_seed(0)
        found.append(accumulate(model, lossfunc, data, *extensions, progress=False, capture=way))
    ours, right = found[1], found[0]
    assert ours.keys() == right.keys()
    assert ours.normaliser == right.normaliser
    for place in right:
        same(ours[place], right[place])
    assert [replays(step) for step in made if step._forms] == [5, 5]  # two passes over the data
    assert all(p.grad is None for p in model.parameters())


def test_over_data_by_a_function() -> None:
    """What a loss divides by is told, and is another number in the last batch."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y)

    data = batches([4] * 7 + [3] * 6)
    found = [
        accumulate(
            *(mlp_of(0), loss, data, ClippedSumGrad(0.1), BatchGrad()),
            normaliser=lambda x, y: len(y),
            progress=False,
            capture=way,
        )
        for way in (False, True)
    ]
    for place in found[0]:
        same(found[1][place], found[0][place])


def test_over_data_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = mlp(), batches([4])
    with pytest.raises(UsageError, match="compile"):
        accumulate(model, nn.CrossEntropyLoss(), data, BatchGrad(), capture="inducted")
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UsageError, match="has a hook that runs after its gradient was added"):
        accumulate(model, nn.CrossEntropyLoss(), data, BatchGrad(), capture=True)
    handle.remove()
    monkeypatch.setitem(sys.modules, "backpack_capture", None)
    with pytest.raises(UsageError, match=r"pip install 'backpack-data\[capture\]'"):
        accumulate(model, nn.CrossEntropyLoss(), data, BatchGrad(), capture=True)


def test_micro_batches() -> None:
    (found, _), (ours, step) = (_combined(way) for way in (False, True))
    same(ours, found)
    assert replays(step) >= 10


def _combined(is_captured: bool) -> Any:
    model, lossfunc = extend(mlp_of(0)), extend(nn.CrossEntropyLoss())
    total, values = combined(model, Factors(), Variance()), []
    step = capture(lambda x, y: lossfunc(model(x), y), lossfunc, total)
    for number, (x, y) in enumerate(batches([4, 6] * 9)):
        torch.manual_seed(number)
        if is_captured:
            step(x, y)
        else:
            with total:
                lossfunc(model(x), y).backward()
        values.append([(p.kfac.tensors(), p.variance) for p in model.parameters()])
        if number % 4 == 3:
            total.reset()
    return (values, [p.grad for p in model.parameters()]), step


# Optimizers -------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "kfac": lambda m: KFAC(m, lr=0.05, factors_every=2, inverses_every=3, kl_clip=1e-2),
    "ekfac": lambda m: EKFAC(m, lr=0.05, inverses_every=4),
    "groups": lambda m: KFAC(
        m, [{"params": m[0].parameters()}, {"params": m[2].parameters(), "method": "adam"}]
    ),
    "adaptive": lambda m: KFAC(m, lr=0.05, adapt=LevenbergMarquardt(every=3), mc_samples=None),
}


@pytest.mark.parametrize(
    ("name", "parts"), [("kfac", 2), ("ekfac", 1), ("groups", 1), ("adaptive", 1)]
)
def test_optimizers(name: str, parts: int) -> None:
    trained = [_trained(name, parts, way) for way in (False, True)]
    (losses, weights, damping, _), (ours, own, its, step) = trained
    assert damping == its
    same([*own, *ours], [*weights, *losses])
    assert replays(step) >= 8, step.report()


def _trained(name: str, parts: int, is_captured: bool) -> Any:
    model, lossfunc = extend(mlp_of(1)), extend(nn.CrossEntropyLoss())
    optimizer, losses = SETTINGS[name](model), list[Tensor]()

    def plain(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = lossfunc(model(x), y)
        loss.backward()
        return loss.detach()

    step, block = plain, optimizer.curvature
    if is_captured:
        step = capture(lambda x, y: lossfunc(model(x), y), lossfunc, optimizer)
        block = nullcontext
    data = batches([5] * 20 if parts == 1 else [5, 3] * 18)
    for number in range(0, len(data), parts):
        torch.manual_seed(number)
        optimizer.zero_grad()
        if name == "adaptive":
            losses.append(optimizer.step(partial(step, *data[number])))
            continue
        for batch in data[number : number + parts]:
            with block():
                losses.append(step(*batch))
        optimizer.step()
    return losses, [p.detach() for p in model.parameters()], optimizer.damping, step


class Late(nn.Module):
    """A layer joins later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.later(hidden) if self.is_late else hidden)


def test_a_layer_that_joins_later_is_corrected_too() -> None:
    """Its eigenvectors come, and later ones go to where the graph reads them."""
    (weights, _), (ours, step) = (_with_a_late_layer(way) for way in (False, True))
    same(ours, weights)
    assert replays(step) >= 8, step.report()


def _with_a_late_layer(is_captured: bool) -> Any:
    torch.manual_seed(1)
    model, lossfunc = extend(Late()), extend(nn.CrossEntropyLoss())
    optimizer = EKFAC(model, lr=0.05, inverses_every=4)
    step = capture(lambda x, y: lossfunc(model(x), y), lossfunc, optimizer)
    for number, (x, y) in enumerate(batches([5] * 26)):
        torch.manual_seed(number)
        model.is_late = number >= 6
        optimizer.zero_grad()
        if is_captured:
            step(x, y)
        else:
            with optimizer.curvature():
                lossfunc(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], step


def test_hosts_decide_what_is_computed() -> None:
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    optimizer = KFAC(model)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return lossfunc(model(x), y)

    for more in ({"gradient": "none"}, {"check": "never"}, {"observer": Weights}):
        with pytest.raises(UsageError, match="KFAC decides what its passes compute"):
            capture(function, lossfunc, optimizer, **more)
    with pytest.raises(UsageError, match="KFAC decides"):
        capture(function, lossfunc, optimizer, BatchGrad())
    with pytest.raises(UsageError, match=r"combined\(\.\.\., debug"):
        capture(function, lossfunc, combined(model, BatchGrad(), debug=True))
    with pytest.raises(UsageError, match="observer= makes an object"):
        capture(function, model, lossfunc, BatchGrad(), observer=dict)
    step = capture(function, lossfunc, optimizer)
    for _ in range(6):
        step(torch.rand(4, 5), torch.randint(3, (4,)))
    assert "captured" in step.report()
    assert "graph of" in step.report()
    assert step.wait()
    assert "def step" in step.code
