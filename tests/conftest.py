"""Double precision, a fixed seed, nothing left behind by any test; options: random nets, device."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any
from zlib import crc32

import pytest
import torch

from backpack_core import plugins
from backpack_core.errors import warned
from backpack_core.testing.layer_run import shared_run_of
from backpack_operations.planning import Planning
from backpack_products.conformance.loss_checks import shared_run
from tests import steps
from tests.devices import DrawnOnHost, everywhere, usable
from tests.leftovers import left_behind, settle, state


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random nets")
    group.addoption("--nets", type=int, default=100, help="number of random nets")
    group.addoption("--traps", type=int, default=30, help="number of random nets with a trap")
    group.addoption("--seed", type=int, default=0, help="seed of the first of them")
    parser.getgroup("grids").addoption(
        "--grids",
        choices=("drawn", "whole"),
        default="drawn",
        help="whether all cases of large grids run, or the share that their marker names",
    )
    parser.getgroup("plans").addoption(
        "--plans",
        choices=("on", "off", "twice"),
        default="on",
        help="whether passes go by plans; twice: every pass is planned anew, and compared",
    )
    parser.getgroup("devices").addoption(
        "--device", default="cpu", help="where the tensors of the tests are made, as cuda or cuda:1"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are collected: some make tensors when they are imported.

    A default device, the host too, is a mode: every call of torch goes through Python.
    """
    device = usable(config.getoption("--device"))
    if device.type != "cpu":
        everywhere(device)
    for accelerator in (torch.cuda, torch.xpu, torch.mtia):
        if not accelerator.is_available():  # torch notes each seed for later, and who set it
            accelerator.manual_seed_all = lambda seed: None  # type: ignore[assignment]
    steps.switch_on()
    plans = config.getoption("--plans")
    if plans != "on":
        Planning.take = _take_none  # type: ignore[method-assign]
    if plans == "off":
        Planning.make = _make_none  # type: ignore[method-assign]


def _take_none(planning: Planning, run: Any) -> bool:
    """No pass goes by a plan."""
    return False


def _make_none(planning: Planning, run: Any) -> None:
    """No pass is compared with a plan."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what asks which passes went by a plan, where none does, and parts of grids."""
    left_out = set()
    if config.getoption("--plans") != "on":
        left_out |= {item for item in items if item.get_closest_marker("plans")}
    if config.getoption("--grids") == "drawn" and len({item.path for item in items}) > 1:
        left_out |= {item for item in items if not is_drawn(item)}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])


def is_drawn(item: pytest.Item) -> bool:
    """Whether a test runs without ``--grids=whole``: of a grid, those of its share."""
    marker = item.get_closest_marker("grid")
    return marker is None or crc32(item.nodeid.encode()) % marker.args[0] == 0


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """What modules of tests draw when they are imported is drawn on the host, too."""
    with nullcontext() if torch.get_default_device().type == "cpu" else DrawnOnHost():
        return (yield)


def pytest_collection_finish() -> None:
    """What is there before the first test is garbage of none."""
    settle()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What became of all random nets, whatever process judged them."""
    for kind in ("nets", "traps"):
        found = [
            dict(report.user_properties)[kind]
            for outcome in ("passed", "failed")
            for report in terminalreporter.getreports(outcome)
            if kind in dict(getattr(report, "user_properties", ())) and report.when == "call"
        ]
        if not found:
            continue
        from tests.nets.report import Tally  # a run without random nets does without it

        total = Tally()
        for counts in found:
            total.merge(counts)
        terminalreporter.section(f"random {kind}")
        for line in total.lines():
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _double_precision(request: pytest.FixtureRequest) -> Iterator[None]:
    """With a fixed seed, and the same numbers on every device.

    And warnings that come once per process come once per test: a fixture for each of the two would
    cost the whole suite seconds.
    """
    warned.clear()
    before, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float64)
    if device.type != "cpu" and request.node.get_closest_marker("host"):
        with torch.device("cpu"):
            torch.manual_seed(0)
            yield
        torch.set_default_dtype(before)
        return
    if device.type == "cpu":
        torch.default_generator.manual_seed(0)  # that of other devices notes who asks, for long
        yield
    else:
        torch.manual_seed(0)
        with DrawnOnHost():
            yield
    torch.set_default_dtype(before)


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note failures: their tracebacks keep alive what a test had."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


def forget_runs() -> None:
    """The kit keeps the latest runs, and the calls in them."""
    shared_run_of.cache_clear()
    shared_run.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    forget_runs()
    before = state()
    yield
    request.node.funcargs.clear()  # what fixtures gave
    forget_runs()
    if not request.node.stash.get(_FAILED, False):
        assert not left_behind(before)


@pytest.fixture
def without_cudnn() -> Iterator[None]:
    """Its recurrent layers are differentiated once, and in training mode alone."""
    with torch.backends.cudnn.flags(enabled=torch.get_default_device().type == "cpu"):
        yield


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the library logs."""
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("backpack_core")
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(listener)
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def plugins_of_a_test() -> None:
    """What is installed is loaded, also where the test before forgot all plugins."""
    plugins.ensure_loaded()
