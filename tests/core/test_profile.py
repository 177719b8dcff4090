"""Where the time of a block goes: a table, and labels for torch's profiler."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_checks.profile import Profile, Summary
from backpack_core import backpack, extend
from backpack_core.errors import AutodiffFallbackWarning
from backpack_core.extensions import HMP, BatchGrad, DiagGGNExact, DiagHessian
from backpack_products.tuning import within_budget


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + self.shift)


def run(*extensions: Any, passes: int = 1) -> Summary:
    model = extend(nn.Sequential(nn.Linear(3, 3), Shift(), nn.Linear(3, 2)))
    lossfunc = extend(nn.MSELoss())
    with backpack(*extensions) as block:
        for _ in range(passes):
            lossfunc(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
    return block.summary()


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_a_row_for_each_module_and_extension() -> None:
    summary = run(BatchGrad(), DiagGGNExact(), HMP(), passes=2)
    rows = {(row.module, row.extension): row for row in summary.rows}
    assert rows["Linear '0'", "BatchGrad"].way == "rule"
    assert rows["Linear '0'", "BatchGrad"].calls == 2  # both parameters at once, two passes
    assert rows["Shift '1'", "DiagGGNExact"].way == "autodiff"
    assert rows["Shift '1'", "BatchGrad"].bytes == 4 * 3 * 8
    assert rows["the loss", "HMP"].way == "graph"
    assert rows["Linear '2'", "MixedSqrt"].way == "sent"
    assert all(row.seconds > 0 for row in summary.rows)
    assert summary.rows == sorted(summary.rows, key=lambda row: -row.seconds)


def test_no_time_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals of the softmax go through the rest of the net while it is visited."""
    under_way: list[str] = []

    def watch(profile: Profile, module: nn.Module, kind: type, way: str, *call: Any) -> Any:
        assert not under_way
        under_way.append(way)
        result = timed(profile, module, kind, way, *call)
        under_way.clear()
        return result

    timed = Profile.__call__
    monkeypatch.setattr(Profile, "__call__", watch)
    layers = nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 20), nn.Softmax(1), nn.Linear(20, 3)
    model, lossfunc = extend(nn.Sequential(*layers)), extend(nn.CrossEntropyLoss())
    with within_budget(1), backpack(DiagHessian()) as block:
        lossfunc(model(torch.randn(5, 3)), torch.randint(3, (5,))).backward()
    ways = {(row.module, row.way): row.calls for row in block.summary().rows}
    assert ways["Linear '0'", "rule"] > ways["Linear '4'", "rule"]  # with chunks of residuals


def test_what_the_library_checks_is_one_row() -> None:
    """In the first passes of a structure, sums of individual gradients are compared."""
    model = extend(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    rows = []
    for check in ("first", "never"):
        with backpack(BatchGrad(), check=check) as block:
            model(torch.randn(4, 3)).square().sum().backward()
        rows.append({row.extension: row for row in block.summary().rows})
    found = rows[0]["(checks of sums)"]
    assert (found.module, found.way, found.calls) == ("all modules", "check", 2)
    assert found.seconds > 0
    assert "SumCheck" not in rows[0]
    assert set(rows[1]) == {"BatchGrad"}


def test_as_text() -> None:
    lines = str(Summary([])).splitlines()
    assert lines[0].split() == ["module", "extension", "way", "calls", "ms", "%", "KiB"]
    assert lines[-1].split()[0] == "all"


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_as_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = run(BatchGrad())  # torch may look for pandas while the model runs
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    frame = summary.to_frame()
    assert list(frame) == ["module", "extension", "way", "calls", "seconds", "bytes"]
    assert len(set(map(len, frame.values()))) == 1
    assert "Linear '0'" in frame["module"]
    assert str(run(BatchGrad())).count("BatchGrad") == 3


def test_nothing_was_done() -> None:
    assert backpack(BatchGrad()).summary().rows == []


@pytest.mark.filterwarnings("ignore")
def test_labels_for_a_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(BatchGrad(), DiagGGNExact())
    labels = {event.key for event in profile.key_averages()}
    assert "backpack: BatchGrad at Linear '0'" in labels
    assert "backpack: MixedSqrt at Linear '2'" in labels


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_no_labels_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a label without a profiler")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    run(BatchGrad())


def test_the_warning_is_still_one() -> None:
    from backpack_core.errors import warned

    warned.clear()
    with pytest.warns(AutodiffFallbackWarning):
        run(BatchGrad())
