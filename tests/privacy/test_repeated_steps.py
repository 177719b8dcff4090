"""Passes of private steps repeat recordings; they equal those of the engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import visits
from backpack_core.engine.active import Context
from backpack_privacy import AdaptiveClipping, Clipping
from tests.privacy.problems import NETS, difference, privately

EPOCHS = 6


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FIRST", 1)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many passes of all blocks have done what."""
    known: Counter[str] = Counter()
    begin = Context.__init__

    def counted(self: Context, *args: Any, **options: Any) -> None:
        begin(self, *args, **{**options, "history": known})

    monkeypatch.setattr(Context, "__init__", counted)
    return known


def train(is_step: bool, net: str = "perceptron", **options: Any) -> tuple[Any, nn.Module]:
    """By ``private.step``, or by a loop of one's own, whose passes are those of the engine."""
    private, model, lossfunc = privately(net, noise_multiplier=0.7, **options)
    for _ in range(EPOCHS):
        for x, y in private.loader:
            if is_step:
                private.step(lossfunc(model(x), y))
                continue
            with private:
                lossfunc(model(x), y).backward()
            private.optimizer.step()
    return private, model


def compare(
    passes: Counter[str], net: str = "perceptron", clipping: Any = None, **options: Any
) -> int:
    """How many passes were repeated; parameters, norms, bounds and epsilon are the same."""
    made = [{} if clipping is None else {"clipping": clipping()} for _ in range(2)]
    right, other = train(False, net, **made[0], **options)
    assert not passes["repeated a recording"]
    ours, model = train(True, net, **made[1], **options)
    assert difference(model, other) < 1e-13
    assert ours.clipping.bounds == pytest.approx(right.clipping.bounds, rel=1e-12)
    for record, wanted in zip(ours.records, right.records, strict=True):
        assert record.norms.keys() == wanted.norms.keys()
        for name, norms in wanted.norms.items():
            torch.testing.assert_close(record.norms[name], norms, rtol=1e-12, atol=0.0)
    return passes["repeated a recording"]


@pytest.mark.parametrize("net", NETS)
def test_steps_repeat(net: str, passes: Counter[str]) -> None:
    assert compare(passes, net, sampling="shuffled") >= 4


def bounded(norms: Tensor, bound: float) -> Tensor:
    return bound / (bound + norms)


class Halved(Clipping):
    def weights(self, norms: Tensor, bound: float) -> Tensor:
        return super().weights(norms, bound) / 2


CLIPPINGS = {
    "layers": (lambda: Clipping(0.5, "per_layer"), True),
    "patterns": (lambda: Clipping({"0.*": 0.3, "*": 0.2}), True),
    "automatic": (lambda: Clipping(0.5, weights="automatic"), True),
    # Functions may do more than compute, and bounds that change are settings.
    "own weights": (lambda: Clipping(0.5, weights=bounded), False),
    "own class": (lambda: Halved(0.5), False),
    "adaptive": (lambda: AdaptiveClipping(0.5, count_noise=5.0), False),
}


@pytest.mark.parametrize("name", CLIPPINGS)
def test_clippings(name: str, passes: Counter[str]) -> None:
    make, may_repeat = CLIPPINGS[name]
    assert bool(compare(passes, clipping=make, sampling="shuffled")) is may_repeat


def test_batches_of_any_size_and_users(passes: Counter[str]) -> None:
    """Poisson batches have other sizes, and may be empty."""
    compare(passes)
    passes.clear()
    compare(passes, users=[*range(6)] * 2)
