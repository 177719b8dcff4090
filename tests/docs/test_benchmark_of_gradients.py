"""The benchmark of quantities of first order: every column, on a net that takes no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_products import SampleProduct
from backpack_products.operations import batch_sum
from benchmarks import gradient, measure, shares
from benchmarks.limit import limit, shared_limit
from benchmarks.peers import FIRST_ORDER
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.quantities import QUANTITIES

FIRST = ("BatchGrad", "SumGradSquared", "Variance", "FirstFour", "BatchL2Grad", "ClippedSumGrad")


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


SMALL = Problem("small", net, (1, 4, 4), 3, 5, 5)


def results(name: str, quantity: str) -> list[Tensor]:
    """What a peer has after a step, parameter by parameter."""
    step, model = FIRST_ORDER[name](SMALL, QUANTITIES[quantity], SMALL.batch)
    for _ in range(measure.SETTLED):
        model.zero_grad()
        step()
    if name in ("ours", "shared", "none"):
        return [getattr(p, QUANTITIES[quantity].fields[-1]) for p in model.parameters()]
    stored: Any = model.stored
    return [value[-1] if isinstance(value, tuple) else value for value in stored]


@pytest.mark.parametrize("quantity", FIRST)
@pytest.mark.parametrize("name", ["shared", "none", "vmap"])
def test_peers_compute_the_same(name: str, quantity: str) -> None:
    for one, other in zip(results(name, quantity), results("ours", quantity), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "resnet18"])
def test_problems(name: str) -> None:
    """Every net runs, and what it needs at least is known."""
    problem = PROBLEMS[name]
    x, _ = problem.data(2)
    assert problem.net()(x).shape == (2, problem.classes)
    for kind in FIRST:
        least, shared = (
            limit(problem, QUANTITIES[kind], 2),
            shared_limit(problem, QUANTITIES[kind], 2),
        )
        assert least is not None
        assert shared is not None
        assert 1 <= shared.work <= least.work


def test_llama_attends_to_what_came_before() -> None:
    """A later token changes no earlier one: the classifier looks at the last."""
    problem = PROBLEMS["llama"]
    net, (x, _) = problem.net(), problem.data(1)
    hidden: Any = net.get_submodule("blocks")(net.get_submodule("tokens")(x))
    changed = x.clone()
    changed[0, 40:] = (x[0, 40:] + 1) % problem.vocabulary
    other: Any = net.get_submodule("blocks")(net.get_submodule("tokens")(changed))
    torch.testing.assert_close(hidden[:, :40], other[:, :40])
    assert not torch.allclose(hidden[:, 40:], other[:, 40:])


def test_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the clock starts, and before it stops; peers are warm by then."""
    events: list[str] = []
    steps = {"one": lambda: events.append("step")}

    def clock() -> float:
        events.append("clock")
        return float(len(events))

    monkeypatch.setitem(measure.CLOCKS, "wall", clock)
    wait: Callable[[], None] = lambda: events.append("wait")  # noqa: E731
    measure.alternate(steps, 0.0, "wall", lambda name: None, least=1, most=1, synchronise=wait)
    assert events == ["wait", "clock", "step", "wait", "clock"]
    assert measure.synchroniser("cpu") is None
    assert measure.synchroniser("cuda:0") is torch.cuda.synchronize


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each cell, with a number for each column that there is."""
    monkeypatch.setitem(gradient.PROBLEMS, "logreg", replace(SMALL, name="logreg"))
    options = ["--problem", "logreg", "--quantity", "BatchGrad", "--batch", "1", "3"]
    threads = str(torch.get_num_threads())
    gradient.main([*options, "--seconds", "0", "--peer", "vmap", "--threads", threads])
    where, head, *lines = capsys.readouterr().out.splitlines()
    assert where.startswith("cpu")
    columns = head.split()
    assert [line.split()[2] for line in lines] == ["1", "3"]
    row = dict(zip(columns[5:], lines[0].split()[4:], strict=True))
    assert float(row["shared"]) > 0
    assert float(row["vmap"]) > 0
    assert row["incumbent"] == row["ghost"] == "-"
    assert float(row["less"]) <= float(row["limit"])


@pytest.mark.parametrize("quantity", ["BatchGrad", "ClippedSumGrad"])
def test_shares_add_up(quantity: str) -> None:
    found = shares.line(SMALL, QUANTITIES[quantity], 0.0, "cpu")
    whole = found["bare"] + found["hooks"] + found["kernels"] + found["rest"]
    assert whole == pytest.approx(found["ours"])
    forms = {name: spent for name, spent in found.items() if name not in shares._HEAD}
    assert found["kernels"] == pytest.approx(sum(forms.values()))
    assert ("finish" in forms) == (quantity == "ClippedSumGrad")


def test_shares_read_sums_where_a_pass_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def noted(product: SampleProduct) -> Tensor:
        seen.append(product.shape)
        return batch_sum(product)

    monkeypatch.setattr(shares, "batch_sum", noted)
    read = shares.reading(SMALL, QUANTITIES["BatchGrad"], SMALL.batch)
    read(lambda: 0.0)
    assert seen == [torch.Size([3]), torch.Size([2])]  # weights have few positions
