"""Recorded steps compiled by Inductor: the engine's numbers but for rounding."""

from __future__ import annotations

import copy
import gc
import os
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from backpack_capture import CaptureWarning, capture, inductor
from backpack_capture.graph import LOOKS
from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from backpack_products.tuning import CACHE, memory_budget, piece_size, unsplit
from tests.capture.nets import NETS
from tests.capture.test_exact import made
from tests.devices import rng_state
from tests.versions import needs_compiler

Function = Callable[..., Any]


class Pair:
    """Equal nets, one of them captured and compiled."""

    def __init__(self, net: str, *names: str, scale: Function = lambda x: 1.0) -> None:
        make, self.draw = NETS[net]
        first = make()
        self.models = [extend(first), extend(copy.deepcopy(first))]
        self.losses = [extend(nn.CrossEntropyLoss()) for _ in range(2)]
        self.names, self.scale = names, scale
        model, lossfunc = self.models[0], self.losses[0]
        self.step = capture(
            lambda x, y: lossfunc(model(x), y) * scale(x),
            *(model, lossfunc, *map(made, names)),
            compile="inductor",
        )

    def run(self, seed: int, more: float = 0.0) -> None:
        x, y = self.draw(4)
        x = x + more if more else x
        for model in self.models:
            model.zero_grad()
        torch.manual_seed(seed)
        with backpack(*map(made, self.names)):
            right = self.losses[1](self.models[1](x), y) * self.scale(x)
            right.backward()
        state = rng_state()
        torch.manual_seed(seed)
        torch.testing.assert_close(self.step(x, y), right.detach())
        assert torch.equal(rng_state(), state)
        for one, other in zip(*(m.parameters() for m in self.models), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
            for name in self.names:
                field = made(name).savefield
                ours, right = one.__dict__[field], other.__dict__[field]
                torch.testing.assert_close([*ours], [*right])
        for one, other in zip(*(m.buffers() for m in self.models), strict=True):
            torch.testing.assert_close(one, other)

    def compile(self) -> None:
        for seed in range(6):
            self.run(seed)
        assert self.step.wait(600)


@needs_compiler
@pytest.mark.host("steps on a GPU are not timed")
def test_compiled_code_that_is_slower_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("mlp", "BatchGrad")

    class Slow:
        said = "compiled"

        def __init__(self, program: Any, given: Any) -> None: ...

        def take(self) -> Function:
            graph = next(iter(pair.step._forms.values()))[0].graph
            return lambda *given: time.sleep(0.03) or graph.code.run(*given)

    pair.step._compiler = type(pair.step._compiler)(Slow)  # type: ignore[misc, arg-type]
    for seed in range(2 * LOOKS + 6):
        pair.run(seed)
    assert "times as long as recorded operations" in pair.step.report()


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(
    ("net", "names"),
    [
        ("mlp", ("BatchGrad", "KFAC")),
        ("dropout", ("BatchGrad", "DiagGGNMC")),
        ("cnn", ("SumGradSquared", "BatchL2Grad")),
        ("tied", ("BatchGrad",)),
        ("encoder", ("BatchGrad",)),
        ("batch_norm", ("Variance",)),
        ("gru", ("DiagGGNExact",)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_quantities(net: str, names: tuple[str, ...]) -> None:
    pair = Pair(net, *names)
    pair.compile()
    assert re.search(r"compiled by Inductor in \d+ s", pair.step.report()), pair.step.report()
    for seed in range(9):
        pair.run(seed)
    assert re.search(r"compiled by Inductor in \d+ s", pair.step.report()), pair.step.report()


@needs_compiler
@pytest.mark.long
def test_what_is_read_is_compared_afterwards() -> None:
    pair = Pair("mlp", "BatchGrad", scale=lambda x: 2.0 if x.sum() > 20 else 1.0)
    pair.compile()
    for seed in range(20):
        pair.run(seed, more=2.0 * (seed % 5 == 4))
    report = pair.step.report()
    assert "compiled by Inductor in" in report
    assert "4 run again" in report


@needs_compiler
def test_a_compiler_that_fails_leaves_the_recorded_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_WORKER", "raise SystemExit('no compiler is here')")
    pair = Pair("mlp", "BatchGrad")
    pair.compile()
    pair.run(7)
    report = pair.step.report()
    assert "not compiled: Inductor failed: no compiler is here" in report
    assert "graph of" in report


@needs_compiler
def test_what_cannot_be_compiled_is_said() -> None:
    pair = Pair("mlp", "BatchGrad", scale=lambda x: x[x > -1].sum())
    for seed in range(6):
        pair.run(seed)
    assert "not compiled: the shape of a tensor depends on values" in pair.step.report()
    assert pair.step.wait()


@needs_compiler
def test_compiled_code_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("mlp", "BatchGrad")

    class Wrong:
        said = "compiled wrongly"

        def __init__(self, program: Any, given: Any) -> None: ...

        def take(self) -> Function:
            graph = next(iter(pair.step._forms.values()))[0].graph
            return lambda *given: [t + 1 for t in graph.code.run(*given)]

    pair.step._compiler = type(pair.step._compiler)(Wrong)  # type: ignore[misc, arg-type]
    for seed in range(LOOKS + 7):
        pair.run(seed)
    assert "not compiled: its graph gave something other than the engine" in pair.step.report()


@needs_compiler
def test_a_step_that_is_gone_stops_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_WORKER", "import time; time.sleep(600)")
    pair = Pair("mlp", "BatchGrad")
    for seed in range(5):
        pair.run(seed)
    assert "being compiled by Inductor for" in pair.step.report()
    compilation = next(iter(pair.step._forms.values()))[0].graph.compilation
    process, folder = compilation._process, compilation._folder
    assert process.poll() is None
    assert os.getpgid(process.pid) != os.getpgrp()  # Ctrl-C does not cut off what it writes
    assert folder.exists()
    del compilation, pair
    gc.collect()
    assert process.poll() is not None
    assert not folder.exists()


def test_products_are_recorded_whole() -> None:
    with unsplit():
        assert piece_size(CACHE) == memory_budget()
    assert piece_size(CACHE) == min(CACHE, memory_budget())


def test_words() -> None:
    with pytest.raises(UsageError, match='"inductor" or "cudagraphs"'):
        capture(lambda x: x, nn.Linear(1, 1), made("BatchGrad"), compile="fast")


def test_older_torch_has_no_such_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._inductor, "standalone_compile", raising=False)
    with pytest.raises(UsageError, match=r"needs torch 2\.8 or later.* leave out compile="):
        capture(lambda x: x, nn.Linear(1, 1), made("BatchGrad"), compile="inductor")


@needs_compiler
def test_no_warning_says_what_the_report_says() -> None:
    """The engine does not run in its place: nothing is slower than without ``compile``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        test_what_cannot_be_compiled_is_said()
