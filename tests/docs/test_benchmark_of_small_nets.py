"""The benchmark of small nets: every column, on a net that takes no time."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import measure, peers, small
from benchmarks.problems import Problem
from benchmarks.quantities import QUANTITIES


def net() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Linear(3, 2))


TINY = Problem("tiny", net, (4,), 2, 5, 5)


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> list[list[str]]:
    """The words of each line."""
    threads = str(torch.get_num_threads())
    small.main(["--net", "3x64", "--rounds", "1", "--threads", threads, *options])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("where", [[], ["--forward-outside"]])
def test_table(
    where: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number for each column that there is: multiples, microseconds for each call, measured."""
    monkeypatch.setitem(small.NETS, "3x64", TINY)
    monkeypatch.setitem(peers.LIBRARIES, "incumbent", peers.LIBRARIES["ours"])
    first, _, head, columns, *lines = printed(capsys, *where, "--quantity", "BatchGrad", "KFAC")
    assert ("only;" in first) == bool(where)
    assert head[:5] == ["tiny:", "5", "samples,", "4", "calls,"]
    assert " ".join(columns) == "ours incumbent vmap us/call ours us/call incumbent meas."
    numbers = {tuple(line[:-6]): [number != "-" for number in line[-6:]] for line in lines}
    assert numbers == {
        ("extended",): [True, True, False, True, True, False],
        ("empty", "block"): [True, True, False, True, True, False],
        ("BatchGrad",): [True] * 6,
        ("KFAC",): [True, True, False, True, True, True],
    }
    assert all(float(line[-6]) > 0 for line in lines)


def test_who_cannot_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once for each reason, with the lines that are missing."""

    def fails() -> peers.Library:
        raise peers.Unsupported("it is elsewhere\nand more")

    monkeypatch.setitem(small.NETS, "3x64", TINY)
    monkeypatch.setitem(peers.LIBRARIES, "incumbent", fails)
    *_, last = printed(capsys, "--quantity", "BatchGrad", "--peer", "incumbent")
    assert " ".join(last) == ("no incumbent for extended, empty block, BatchGrad: it is elsewhere")


def test_ours_must_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> peers.Library:
        raise peers.Unsupported("broken")

    monkeypatch.setitem(peers.LIBRARIES, "ours", fails)
    with pytest.raises(peers.Unsupported, match="broken"):
        small.warm(TINY, [small.EXTENDED], ["ours"], inside=True)


def test_rare_passes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that are measured: after the warm ones, fewer than nine tenths, and the slowest."""
    seconds, passes = 0.0, measure.SETTLED

    def step() -> None:
        nonlocal seconds, passes
        passes += 1
        before = passes - 2
        seconds += 10 if passes == 6 else (4 if before & (before - 1) == 0 else 1)

    monkeypatch.setitem(measure.CLOCKS, "wall", lambda: seconds)
    found = small.low({small.PLAIN: step}, {small.PLAIN: lambda: None}, 3, "wall")
    assert found == {small.PLAIN: 1}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in a library of its own, in the place of ours."""
    found: list[str] = []

    @contextmanager
    def block(*_: object) -> Iterator[None]:
        found.append("enter")
        yield
        found.append("exit")

    def extend(module: nn.Module) -> nn.Module:
        module.register_forward_hook(lambda *_: found.append("forward"))
        return module

    package: ModuleType = SimpleNamespace(extend=extend, backpack=block)  # type: ignore[assignment]
    monkeypatch.setitem(peers.LIBRARIES, "ours", lambda: (package, package))
    return found


@pytest.mark.parametrize("inside", [False, True])
def test_forward_pass_is_where_it_is_said(inside: bool, events: list[str]) -> None:
    step, _ = small.ways(small.EMPTY, ["ours"], inside)["ours"](TINY, small.EMPTY, 2)
    step()
    both = ["forward", "forward"]  # model and loss
    assert events == (["enter", *both, "exit"] if inside else [*both, "enter", "exit"])


def test_first_passes_are_not_timed(events: list[str]) -> None:
    """In them a structure is measured, again and again."""
    ready = small.warm(TINY, [small.EMPTY], ["ours"], inside=True)
    assert ready.steps.keys() == {small.PLAIN, ("empty block", "ours")}
    assert events.count("enter") == measure.SETTLED


def test_another_package_is_not_taken_for_the_incumbent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compatibility layer has the same import name, and may come first on the path."""
    distribution = SimpleNamespace(locate_file=lambda name: tmp_path / "site-packages" / name)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
    taken = ModuleType("backpack")
    taken.__file__ = str(tmp_path / "compat" / "backpack" / "__init__.py")
    monkeypatch.setitem(sys.modules, "backpack", taken)
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(peers.Unsupported, match=r"its import name is taken by .*compat"):
        peers.incumbent(TINY, QUANTITIES["BatchGrad"], 2)
