"""What is read off values is compared in each replay; if it differs, the engine runs the step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core.errors import OverwrittenInputError
from backpack_core.extensions import KFAC, BatchGrad
from tests.capture.nets import mlp
from tests.capture.twins import Twins

Function = Callable[[Tensor, Tensor], Any]


def branch(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        h = torch.nn.functional.dropout(x, 0.5) if x.mean() > 0 else -2 * x
        return lossfunc(model(h), y)

    return step


def number_of_rounds(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        h = x
        for _ in range(1 + int(x[0, 0] > 0)):
            h = h.sin()
        return lossfunc(model(h), y)

    return step


def listed(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        signs = (x[:1, :1] > 0).tolist()
        return lossfunc(model(x if signs[0][0] else 3 * x), y)

    return step


def equal(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        is_zero = torch.equal(x[0, :1].sign(), torch.ones(1))
        return lossfunc(model(3 * x if is_zero else x), y)

    return step


def masked(model: nn.Module, lossfunc: nn.Module) -> Function:
    """As many rows as have a positive entry in front."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        more = x[:, 0][x[:, 0] > 0]
        return lossfunc(model(x + more.sum() * len(more)), y)

    return step


def not_a_number(model: nn.Module, lossfunc: nn.Module) -> Function:
    def step(x: Tensor, y: Tensor) -> Tensor:
        ratio = (x[0, 0].clamp(min=0) / x[0, 0].clamp(min=0)).item()
        return lossfunc(model(x if ratio == ratio else 2 * x), y)

    return step


@pytest.mark.parametrize("write", [branch, number_of_rounds, listed, equal, masked, not_a_number])
@pytest.mark.parametrize("keeps", [False, True])
def test_control_flow(write: Callable[[nn.Module, nn.Module], Function], keeps: bool) -> None:
    twins = Twins(mlp(), [BatchGrad(), KFAC()], write)
    way = torch.rand(4, 5) + 0.1
    other = -way
    labels = torch.randint(3, (4,))
    twins.train([(way, labels)] * 8, keeps)
    assert twins.replays >= 4, twins.step.report()
    for x in (other, way, other, other, way, way):
        twins.run(x * (1 + torch.rand(())), labels, keeps=keeps)
    graphs = [f.graph for forms in twins.step._forms.values() for f in forms if f.graph]
    assert sum(graph.reruns for graph in graphs) == 3


class Counting(nn.Module):
    """Writes to a buffer, before a number is read."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().mean()
        return self.net(x if x.mean() > 0 else 2 * x) + self.total


def test_what_was_written_and_drawn_is_put_back() -> None:
    def write(model: nn.Module, lossfunc: nn.Module) -> Function:
        return lambda x, y: lossfunc(model(x + 0.1 * torch.randn_like(x)), y)

    twins = Twins(Counting(), [BatchGrad()], write)
    x, y = torch.rand(4, 5) + 1, torch.randint(3, (4,))
    for sign in (1, 1, 1, 1, 1, 1, -1, 1, -1, -1, 1):
        twins.run(sign * x, y)
    assert "3 run again" in twins.step.report()


def test_an_argument_that_is_overwritten() -> None:
    def write(model: nn.Module, lossfunc: nn.Module) -> Function:
        def step(x: Tensor, y: Tensor, memory: Tensor) -> Tensor:
            memory += x.detach().mean(0)
            return lossfunc(model(x + memory * (memory.sum() > 0).item()), y)

        return step

    twins = Twins(mlp(), [BatchGrad()], write)
    ours, right = torch.zeros(5), torch.zeros(5)
    for sign in (1, 1, 1, 1, 1, 1, 1, -9, 1, 1, 20, 1):
        x, y = sign * torch.rand(4, 5), torch.randint(3, (4,))
        loss, expected = twins.step(x, y, ours), twins.engine(x, y, right)
        assert torch.equal(loss, expected.detach())
        assert torch.equal(ours, right)
        twins.compare()
    assert twins.replays >= 4


@pytest.mark.parametrize("kind", ["arguments", "a parameter"])
def test_an_argument_in_memory_that_is_written(kind: str) -> None:
    """Autograd refuses it if a layer has saved that memory; so do steps with a graph."""

    def write(model: nn.Module, lossfunc: nn.Module) -> Function:
        def step(x: Tensor, y: Tensor, memory: Tensor) -> Tensor:
            output = model(x)
            memory += 1.0
            return lossfunc(output, y)

        return step

    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    twins = Twins(model, [BatchGrad()], write)
    y = torch.randint(5, (5,))
    for number in range(20):
        x, memory = torch.rand(5, 5), torch.rand(5, 5)
        twins.step(x, y, memory)
        if number >= 8:
            shared = x if kind == "arguments" else twins.model[2].weight.detach()
            with pytest.raises((OverwrittenInputError, RuntimeError), match=r"in ?place"):
                twins.step(x, y, shared.view(5, 5))
    assert "0 compared" not in twins.step.report()


def test_a_graph_that_is_wrong_is_dropped(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs as well in replays 1, 2, 4, 8, …, and its results count."""
    monkeypatch.setenv("WEIGHT", "1")  # which no guard sees

    def write(model: nn.Module, lossfunc: nn.Module) -> Function:
        return lambda x, y: lossfunc(model(x), y) * float(os.environ["WEIGHT"])

    twins = Twins(mlp(), [BatchGrad()], write)
    batches = [(torch.rand(4, 5), torch.randint(3, (4,))) for _ in range(8)]
    twins.train(batches[:6])  # three replays
    assert twins.replays == 3
    monkeypatch.setenv("WEIGHT", "2")
    twins.run(*batches[6])  # the fourth
    assert "gave something other than the engine" in twins.step.report()
    assert any("gave something other" in str(w.message) for w in recwarn)
    twins.train(batches)
    assert twins.replays == 0


def test_several_returned_values() -> None:
    def write(model: nn.Module, lossfunc: nn.Module) -> Function:
        def step(x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
            out = model(x)
            return lossfunc(out, y), {"out": out, "right": (out.argmax(1) == y).sum(), "n": len(x)}

        return step

    twins = Twins(mlp(), [BatchGrad()], write)
    for number in range(8):
        twins.run(*(torch.rand(4, 5), torch.randint(3, (4,)))) if number < 3 else None
    batch = torch.rand(4, 5), torch.randint(3, (4,))
    loss, more = twins.step(*batch)
    assert set(more) == {"out", "right", "n"}
    assert not more["out"].requires_grad
    assert loss.shape == ()


def test_arguments_by_name_and_nested() -> None:
    def write(model: nn.Module, lossfunc: nn.Module) -> Callable[..., Any]:
        return lambda batch, scale=1.0: lossfunc(model(batch["x"]), batch["y"]) * scale

    twins = Twins(mlp(), [BatchGrad()], write)
    for number in range(20):
        batch = {"x": torch.rand(4, 5), "y": torch.randint(3, (4,))}
        scale = 1.0 + number % 2
        torch.manual_seed(0)
        for parameter in (*twins.model.parameters(), *twins.other.parameters()):
            parameter.grad = None
        loss = twins.step(batch, scale=scale)
        assert torch.equal(loss, twins.engine(batch, scale=scale).detach())
        twins.compare()
    assert twins.replays >= 10
