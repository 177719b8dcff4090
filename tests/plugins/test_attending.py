"""Who attends a pass: when observers are called, and what is said where a library is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import View, backpack, extend, hookimpl
from backpack_core.extensions import BatchGrad
from backpack_core.testing.isolation import temporary_plugin
from backpack_operations.observer import PlanObserver
from tests.forks import python


class Noting(PlanObserver):
    """Notes its calls."""

    def __init__(self, calls: list[str], kept: Any = None, goes: bool = True) -> None:
        self._calls, self._goes, self.kept = calls, goes, kept

    def goes_by(self, kept: Any) -> bool:
        self._calls.append(f"goes by {kept}")
        return self._goes

    def begin(self, run: Any) -> None:
        assert run.survey.sites
        self._calls.append(f"begin {'planned' if run.survey.is_planned else 'surveyed'}")

    def leave(self) -> None:
        if "leave" not in self._calls:  # it may be told twice
            self._calls.append("leave")

    def finish(self, run: Any) -> None:
        self._calls.append("finish")

    def results(self, run: Any) -> Sequence[tuple[Any, Mapping[Any, Any]]]:
        self._calls.append("results")
        (extension,) = run.context.extensions
        return [(extension, {use.parameter: "mine" for use in run.survey.uses.values()})]

    def stored(self, run: Any) -> None:
        self._calls.append("stored")


class Looking(Noting):
    """Notes visits, too."""

    def before(self, view: View) -> None:
        self._calls.append(f"before {view.path}")

    def after(self, view: View) -> None:
        self._calls.append(f"after {view.path}")


def _step(model: nn.Module, **options: Any) -> None:
    loss = model(torch.ones(2, 3)).sum()
    with backpack(BatchGrad(), **options):
        loss.backward()


def _attended(kind: type[Noting], *given: Any) -> tuple[SimpleNamespace, list[str]]:
    calls: list[str] = []

    @hookimpl
    def backpack_run(run: Any) -> PlanObserver:
        assert not run.survey.sites
        calls.append("run")
        return kind(calls, *given)

    return SimpleNamespace(backpack_run=backpack_run), calls


def test_an_observer_attends_a_pass() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    plugin, calls = _attended(Looking)
    with temporary_plugin(plugin):
        _step(model, check="never")
    visits = [
        f"{when} {what}" for what in ("Tanh '1'", "Linear '0'") for when in ("before", "after")
    ]
    assert calls == ["run", "begin surveyed", *visits, "leave", "finish", "results", "stored"]
    assert model[0].weight.grad_batch == "mine"


def test_one_that_wants_no_visits_is_not_called() -> None:
    plugin, calls = _attended(Noting)
    with temporary_plugin(plugin):
        _step(extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh())), check="never")
    assert calls == ["run", "begin surveyed", "leave", "finish", "results", "stored"]


@pytest.mark.parametrize("goes", [True, False])
def test_a_plan_keeps_something_for_it_and_is_taken_if_it_agrees(goes: bool) -> None:
    model = extend(nn.Linear(3, 2))
    plugin, calls = _attended(Noting, "what I know", goes)
    with temporary_plugin(plugin):
        _step(model, check="never")
        calls.clear()
        _step(model, check="never")
    how = "planned" if goes else "surveyed"
    assert calls[:3] == ["run", "goes by what I know", f"begin {how}"]


def test_nothing_is_asked_for_and_nobody_attends() -> None:
    plugin, calls = _attended(Noting)
    loss = extend(nn.Linear(3, 2))(torch.ones(2, 3)).sum()
    with temporary_plugin(plugin), backpack(observer=lambda _: None):
        loss.backward()
    assert not calls


WITHOUT = """
import warnings
import torch
from torch import nn
from backpack_core import backpack, extend
from backpack_core.errors import BackpackWarning, MissingPluginError
from backpack_core.extensions import BatchGrad

model = extend(nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)))
lossfunc = extend(nn.MSELoss())

def step(loss, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with backpack(BatchGrad(), **options) as block:
            loss.backward()
    grad, parts = model[0].weight.grad, model[0].weight.grad_batch
    assert torch.allclose(grad, parts.sum(0), atol=1e-6)
    model.zero_grad()
    return block, [str(one.message) for one in caught if one.category is BackpackWarning]

def loss():
    return lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2))

for _ in range(3):
    block, said = step(loss())
    assert not said
try:
    step(loss(), check="always")
except MissingPluginError as error:
    print("always:", error)
try:
    block.summary()
except MissingPluginError as error:
    print("summary:", error)
_, said = step(model(torch.rand(5, 3)).square().sum(), check="never")
assert not said
_, (said,) = step(model(torch.rand(5, 3)).square().sum())
print("first:", said)
assert not step(model(torch.rand(5, 3)).square().sum())[1]
"""


TIMES = """
import torch
from torch import nn
from backpack_core import backpack, extend
from backpack_core.errors import MissingPluginError
from backpack_core.extensions import BatchGrad

model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
with backpack(BatchGrad()) as block:
    lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2)).backward()
try:
    block.summary()
except MissingPluginError as error:
    print(error)
"""


def test_without_operations_nobody_takes_times() -> None:
    """Instead of a table without rows."""
    said = python(TIMES, BACKPACK_BLOCK_PLUGINS="backpack-operations")
    assert "Installed, but blocked: backpack-operations" in said


def test_without_the_library_core_says_what_to_install() -> None:
    said = python(WITHOUT, BACKPACK_BLOCK_PLUGINS="backpack-checks")
    assert said.count("pip install backpack-checks") == 3
    assert [line.partition(":")[0] for line in said.splitlines() if ": " in line][:2] == [
        "always",
        "summary",
    ]
