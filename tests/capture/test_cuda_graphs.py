"""Captured steps on a CUDA device, recorded and as CUDA graphs: equal to the engine's.

``pytest -n 0 -s tests/capture/test_cuda_graphs.py`` prints reports, times and memory too.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import capture
from backpack_capture.nested import Apart
from backpack_core import backpack, extend
from backpack_core.errors import UsageError
from tests.capture.nets import NETS
from tests.capture.test_exact import made

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
COMPILE = pytest.mark.parametrize("compile", [None, "cudagraphs"])
QUANTITIES = (
    "BatchGrad",
    "SumGradSquared",
    "Variance",
    "DiagGGNExact",
    "DiagGGNMC",
    "KFAC",
    "KFRA",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=False):  # for LSTMs
        warnings.simplefilter("ignore")
        yield


class Pair:
    """Two equal nets on the device, one of them captured."""

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        compile: str | None,
        step: Callable[..., Any] = lambda model, lossfunc, x, y: lossfunc(model(x), y),
    ) -> None:
        self.models = [extend(m.to("cuda")) for m in (model, copy.deepcopy(model))]
        self.losses = [extend(nn.CrossEntropyLoss().to("cuda")) for _ in range(2)]
        self.names, self.function = names, step
        first, loss = self.models[0], self.losses[0]
        self.step = capture(
            lambda *given: step(first, loss, *given),
            first,
            loss,
            *map(made, names),
            compile=compile,
        )

    def engine(self, *given: Tensor) -> Tensor:
        with backpack(*map(made, self.names)):
            loss = self.function(self.models[1], self.losses[1], *given)
            loss.backward()
        return loss.detach()

    def run(self, seed: int, *given: Tensor, keeps: bool = False) -> None:
        """One step of both: equal but for rounding, generators included."""
        if not keeps:
            for parameter in (p for model in self.models for p in model.parameters()):
                parameter.grad = None
        given = tuple(t.to("cuda") for t in given)
        torch.manual_seed(seed)
        right = self.engine(*given)
        state = torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        ours = self.step(*given)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        close(ours, right)
        for one, other in zip(*(self.state(m) for m in self.models), strict=True):
            close(one, other)

    def state(self, model: nn.Module) -> list[Any]:
        fields = [made(name).savefield for name in self.names]
        found: list[Any] = [*model.buffers()]
        for p in model.parameters():
            found.append([p.grad, *[p.__dict__.get(field) for field in fields]])
        return found

    def train(self, draw: Callable[[int], Any], steps: int, keeps: bool = False) -> None:
        for number in range(steps):
            self.run(number, *draw(4), keeps=keeps)
            with torch.no_grad():
                for p in (p for model in self.models for p in model.parameters()):
                    if p.grad is not None:
                        p -= 0.1 * p.grad


def close(ours: Any, right: Any) -> None:
    here, there = Apart(ours), Apart(right)
    assert here.form == there.form
    for one, other in zip(here.tensors, there.tensors, strict=True):
        assert one.device == other.device
        size = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-10 * max(size, 1e-3))


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="needs a CUDA device, but torch finds none"):
        capture(lambda x: x, nn.Linear(1, 1), made("BatchGrad"), compile="cudagraphs")


@needs_gpu
@COMPILE
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", QUANTITIES)
def test_quantities(net: str, name: str, compile: str | None) -> None:
    make, draw = NETS[net]
    pair = Pair(make(), (name,), compile)
    try:
        pair.engine(*[t.to("cuda") for t in draw(4)])
    except Exception as error:
        pytest.skip(f"the engine refuses it: {type(error).__name__}")
    pair.train(draw, 10)
    report = pair.step.report().splitlines()[-1]
    print(f"\n{net}, {name}, {compile}:{report}")
    assert "graph of" in report
    assert "a CUDA graph" in report or compile is None


@needs_gpu
@COMPILE
def test_results_of_one_replay_are_not_those_of_the_next(compile: str | None) -> None:
    make, draw = NETS["mlp"]
    pair = Pair(make(), ("BatchGrad",), compile)
    pair.train(draw, 8)
    weight, kept = pair.models[0][0].weight, list[Tensor]()
    for number in range(3):
        pair.run(number, *draw(4))
        kept += [weight.grad, weight.grad_batch]
    copies = [t.clone() for t in kept]
    pair.run(9, *draw(4))
    assert all(map(torch.equal, kept, copies))


@needs_gpu
@COMPILE
def test_gradients_are_accumulated(compile: str | None) -> None:
    make, draw = NETS["mlp"]
    Pair(make(), ("BatchGrad",), compile).train(draw, 10, keeps=True)


class Counting(nn.Module):
    """Keeps a running mean, as norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.mean = nn.Buffer(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x)


@needs_gpu
@COMPILE
def test_buffers_are_written_once(compile: str | None) -> None:
    pair = Pair(Counting(), ("BatchGrad",), compile)
    pair.train(NETS["mlp"].draw, 12)
    assert "graph of" in pair.step.report()


@pytest.mark.parametrize("names", [("BatchGrad", "DiagGGNExact"), ("BatchGrad", "KFAC")])
@needs_gpu
def test_parameters_that_move_are_followed(names: tuple[str, ...]) -> None:
    make, draw = NETS["mlp"]
    pair = Pair(make(), names, "cudagraphs")
    pair.train(draw, 9)
    for model in pair.models:
        model[0].weight.data = model[0].weight.data * 2
    pair.train(draw, 4)
    assert "a CUDA graph" in pair.step.report()


@needs_gpu
@COMPILE
def test_control_flow_on_data(compile: str | None) -> None:
    def step(model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = lossfunc(model(x), y)
        return loss * 2 if x.sum() > 9 else loss

    make, draw = NETS["mlp"]
    pair = Pair(make(), ("BatchGrad",), compile, step)
    for number in range(16):
        x, y = draw(4)
        pair.run(number, x + (number % 5 == 4), y)
    assert " 0 run again" not in pair.step.report()


@needs_gpu
def test_shapes_that_depend_on_values_are_not_compiled() -> None:
    def step(model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scale = x[x > -1].sum()
        loss: Tensor = lossfunc(model(x), y) * scale
        return loss

    make, draw = NETS["mlp"]
    pair = Pair(make(), ("BatchGrad",), "cudagraphs", step)
    pair.train(draw, 8)
    assert "not compiled: the shape of a tensor depends" in pair.step.report()


@needs_gpu
def test_autocast() -> None:
    def step(model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
        loss: Tensor = lossfunc(out.float(), y)
        return loss

    torch.set_default_dtype(torch.float32)
    make, draw = NETS["mlp"]
    pair = Pair(make(), ("KFAC",), "cudagraphs", step)
    pair.train(draw, 10)
    print(pair.step.report())
    assert "a CUDA graph" in pair.step.report()


@needs_gpu
def test_shapes_take_turns_in_one_pool() -> None:
    make, draw = NETS["dropout"]
    pair = Pair(make(), ("BatchGrad", "DiagGGNMC"), "cudagraphs")
    for number in range(30):
        pair.run(number, *draw(2 + number % 3))
    assert pair.step.report().count("a CUDA graph") == 3


@needs_gpu
@pytest.mark.parametrize("name", ["BatchGrad", "KFAC", "DiagGGNExact"])
@pytest.mark.parametrize("width", [64, 1024])
def test_times_and_memory_are_shown(name: str, width: int) -> None:
    torch.set_default_dtype(torch.float32)
    layers = [f for _ in range(4) for f in (nn.Linear(width, width), nn.Tanh())]
    x, y = torch.rand(32, width, device="cuda"), torch.randint(width, (32,), device="cuda")
    print(f"\n{name}, 4 x {width}:")
    for kind in ("plain", "engine", None, "cudagraphs"):
        model, lossfunc = nn.Sequential(*copy.deepcopy(layers)).cuda(), nn.CrossEntropyLoss()
        run = _way(kind, model, lossfunc, name)
        for _ in range(70):
            run(x, y)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(50):
            run(x, y)
            for p in model.parameters():
                p.grad = None
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 50
        peak = torch.cuda.max_memory_allocated() / 2**20
        print(f"  {kind or 'captured':12} {1e6 * seconds:8.0f} us a step, peak {peak:8.1f} MiB")


def _way(
    kind: str | None, model: nn.Module, lossfunc: nn.Module, name: str
) -> Callable[[Tensor, Tensor], Any]:
    if kind == "plain":
        return lambda x, y: lossfunc(model(x), y).backward()
    extend(model), extend(lossfunc)

    def engine(x: Tensor, y: Tensor) -> None:
        with backpack(made(name)):
            lossfunc(model(x), y).backward()

    if kind == "engine":
        return engine
    return capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, made(name), compile=kind)
