"""What is remembered of earlier passes: of which structures, of which models, and for how long."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_checks import trust
from backpack_core import backpack, extend, unextend
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_operations.plan import plans
from backpack_operations.traits import KnownTraits
from tests.cases import Net


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The passes that were measured."""
    found: list[object] = []
    begin = trust.Measurement.__init__

    def noted(self: trust.Measurement, *given: Any) -> None:
        found.append(self)
        begin(self, *given)

    monkeypatch.setattr(trust.Measurement, "__init__", noted)
    return found


def _known(model: nn.Module) -> Any:
    return plans.notes[model][trust.Trust]


def _model() -> nn.Sequential:
    return extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def _pass(model: nn.Module, more: int = 0, samples: int = 5) -> Tensor:
    value: Tensor = model(torch.randn(samples, 3))
    for _ in range(more):
        value = value.sin()
    with backpack(BatchGrad()):
        value.square().sum().backward()
    return value.detach()


def _are_measured(measured: list[object], passes: Sequence[Callable[[], Any]]) -> list[bool]:
    found = []
    for run in passes:
        before = len(measured)
        run()
        found.append(len(measured) > before)
    return found


def test_the_structure_that_was_not_seen_for_longest_is_forgotten(
    measured: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "MOST", 2)
    model = _model()
    runs = [partial(_pass, model, n) for n in (0, 0, 0, 1, 0, 2, 0, 1)]
    # Of the first structure, the passes 1, 2 and 4 are measured; the second one was forgotten.
    assert _are_measured(measured, runs) == [True, True, False, True, True, True, False, True]
    assert len(_known(model)) == 2


def test_structures_are_not_few(measured: list[object]) -> None:
    model = _model()
    for more in range(trust.MOST + 20):
        _pass(model, more % (trust.MOST + 10))
    assert len(_known(model)) == trust.MOST


class Alike:
    """Equal to nothing else, with the same hash as all others of its kind."""

    def __hash__(self) -> int:
        return 0


def test_structures_with_one_hash_are_two() -> None:
    model, surveys = _model(), list[Any]()
    value = model(torch.randn(5, 3))
    with backpack(BatchGrad(), observer=lambda view: surveys.append(view)):
        value.square().sum().backward()
    survey = type("Survey", (), {"sites": {(surveys[0].call, 0): None}, "structure": ("one",)})()
    first, second = Alike(), Alike()
    assert trust.known_of(survey, first) is trust.known_of(survey, first)
    assert trust.known_of(survey, first) is not trust.known_of(survey, second)


def _restored(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    restored: nn.Module = extend(torch.load(file, weights_only=False))
    return restored


@pytest.mark.parametrize("again", [copy.deepcopy, _restored])
def test_a_copy_is_measured_anew(again: Any, measured: list[object]) -> None:
    model = _model()
    for _ in range(5):
        _pass(model)
    other = again(model)
    assert _are_measured(measured, [lambda: _pass(other), lambda: _pass(model)]) == [True, False]


def test_an_unextended_model_is_measured_anew(measured: list[object]) -> None:
    model = _model()
    for _ in range(4):
        _pass(model)
    extend(unextend(model))
    assert _are_measured(measured, [lambda: _pass(model)] * 4) == [True, True, False, True]


def test_a_model_that_is_gone_is_forgotten() -> None:
    model, before = _model(), len(plans.notes)
    _pass(model)
    assert len(plans.notes) == before + 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(plans.notes) <= before


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Linear(3, 2),
    "a container": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "without a rule": lambda: Net(lambda net, x: x * net.p, p=nn.Parameter(torch.ones(3))),
    "a norm": lambda: nn.LayerNorm(3),
}


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_what_calls_have_in_common_is_found_once(
    name: str, extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lossfunc, made = extend(MODELS[name]()), extend(nn.MSELoss()), list[nn.Module]()
    attributes = {part: {*vars(part)} for part in model.modules()}
    begin = KnownTraits.__init__

    def noted(self: KnownTraits, module: nn.Module, *given: Any) -> None:
        made.append(module)
        begin(self, module, *given)

    monkeypatch.setattr(KnownTraits, "__init__", noted)
    for _ in range(3):
        value = model(torch.randn(5, 3))
        loss = lossfunc(value, torch.zeros_like(value))
        with backpack(extension()):
            loss.backward()
    assert len(made) == len({*made})
    assert attributes == {part: {*vars(part)} for part in model.modules()}


def test_a_pass_that_a_checkpoint_makes_as_a_whole(measured: list[object]) -> None:
    """The pass around it has no call of its own."""
    model, lossfunc = _model(), extend(nn.MSELoss())

    def run() -> None:
        x = torch.randn(5, 3, requires_grad=True)
        value = checkpoint(lambda x: lossfunc(model(x), x[:, :2]), x, use_reentrant=True)
        with backpack(BatchGrad()):
            value.backward()

    assert _are_measured(measured, [run] * 5) == [True, True, False, True, False]
