"""Processes that differ learn it, instead of steps that belong to no model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from backpack_core import extend
from backpack_core.errors import UsageError
from backpack_optimizers import EKFAC, KFAC, GaussNewton
from backpack_secondorder.over_data import GGN
from tests.forks import on_ranks
from tests.optimizers.problems import problem, train, values

pytestmark = [
    pytest.mark.host("gloo joins tensors of there"),
    pytest.mark.skipif(
        not distributed.is_available() or sys.platform == "win32",
        reason="this torch was built without torch.distributed, or has no gloo over files",
    ),
]


KINDS: tuple[Any, ...] = (KFAC, EKFAC, GaussNewton)


def said(run: Callable[[], Any]) -> str:
    try:
        run()
    except UsageError as error:
        return str(error)
    return ""


class Branches(nn.Module):
    """Two layers of one size, of which one is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[self.chosen](x)
        return out


class Parts(nn.Module):
    """A loss of two means, which divide by different numbers."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.first = extend(nn.CrossEntropyLoss(ignore_index=ignored))
        self.second = extend(nn.CrossEntropyLoss())

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        total: Tensor = self.first(output, y) + self.second(output, y)
        return total


def different(rank: int) -> dict[str, str]:
    """What is said of passes, models and settings that differ."""
    group = distributed.group.WORLD
    _, lossfunc, x, y = problem()
    reduced = extend(nn.CrossEntropyLoss(reduction="sum" if rank else "mean"))
    frozen, moved, branches = problem()[0], problem()[0], Branches()
    frozen.get_submodule(str(3 * rank)).requires_grad_(False)
    nn.init.constant_(next(moved.parameters()), rank)
    torch.manual_seed(0)
    branches = extend(Branches())
    branches.chosen = rank
    net = lambda: problem()[0]  # noqa: E731
    runs: dict[str, tuple[nn.Module, Any, dict[str, Any]]] = {
        "of different parameters": (branches, lossfunc, {}),
        "some are sums": (net(), reduced, {}),
        "not proportional": (net(), Parts(-1 if rank else 2), {}),
        "The list of trained parameters": (frozen, lossfunc, {}),
        "The checksum of the parameters": (moved, lossfunc, {}),
        "A group": (net(), lossfunc, {"lr": 0.1 + rank}),
        "factors_every": (net(), lossfunc, {"factors_every": 1 + rank}),
        "damping": (net(), lossfunc, {"damping": 0.1 + rank}),
    }
    texts = {}
    for kind in (KFAC, EKFAC):
        for name, (model, loss, settings) in runs.items():
            optimizer = kind(model, mc_samples=None, process_group=group, **settings)
            texts[kind.__name__, name] = said(partial(train, optimizer, model, loss, x, y))
    matrix = GGN(moved, nn.CrossEntropyLoss(), [(x, y)], process_group=group)
    texts["GGN", "The checksum"] = said(matrix.loss)
    model = problem()[0]
    some = [*model.parameters()][rank:]
    matrix = GGN(model, nn.CrossEntropyLoss(), [(x, y)], some, process_group=group)
    texts["GGN", "parameters of the matrix"] = said(matrix.loss)
    newton = GaussNewton(moved, nn.CrossEntropyLoss(), process_group=group)
    texts["Gauss-Newton", "The checksum"] = said(lambda: newton.step([(x, y)]))
    return texts


def test_what_differs_is_named(tmp_path: Path) -> None:
    for texts in on_ranks(different, tmp_path):
        for (kind, name), text in texts.items():
            assert name in text, (kind, name)


def replicas(rank: int) -> list[Tensor]:
    """Parameters after steps of replicas, without a group, and with views as gradients."""
    model, lossfunc, x, y = problem()
    x, y = x[rank:6:2], y[rank:6:2]
    found = []
    for reduction in ("mean", "sum"):
        model, lossfunc, *_ = problem(reduction=reduction)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = KFAC(wrapped, damping=0.1, mc_samples=None)
        for _ in range(2):
            optimizer.zero_grad()
            for part in (slice(0, 1), slice(1, 3)):
                with optimizer.curvature():
                    lossfunc(wrapped(x[part]), y[part]).backward()
                with suppress(ZeroDivisionError), optimizer.curvature():
                    lossfunc(wrapped(x[part]), y[part]).backward()
                    raise ZeroDivisionError
            optimizer.step()
        found.append(values(model))
    model = problem()[0]
    newton = GaussNewton(DistributedDataParallel(model), nn.CrossEntropyLoss(), rtol=1e-12)
    newton.step([(x, y)])
    return [*found, values(model)]


def test_replicas_stay_replicas(tmp_path: Path) -> None:
    wanted = []
    for reduction in ("mean", "sum"):
        model, lossfunc, x, y = problem(reduction=reduction)
        train(KFAC(model, damping=0.1, mc_samples=None), model, lossfunc, x[:6], y[:6], 2)
        wanted.append(values(model))
    model, _, x, y = problem()
    GaussNewton(model, nn.CrossEntropyLoss(), rtol=1e-12).step([(x[:6], y[:6])])
    wanted.append(values(model))
    for found in on_ranks(replicas, tmp_path):
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def trained(kind: Any, part: slice, group: Any, is_resumed: bool) -> Tensor:
    """Parameters after steps, with a group that comes later, and one that is frozen meanwhile."""
    model, lossfunc, x, y = problem()
    newton = kind is GaussNewton

    def made(model: nn.Module) -> Any:
        some = {"params": [*model.get_submodule("0").parameters()], "lr": 0.05}
        settings: dict[str, Any] = {"damping": 0.1, "process_group": group}
        if newton:
            return kind(model, nn.CrossEntropyLoss(), [some], rtol=1e-12, **settings)
        return kind(model, [some], mc_samples=None, inverses_every=2, **settings)

    def added(optimizer: Any, model: nn.Module) -> None:
        late = {"params": [*model.get_submodule("3").parameters()], "lr": 0.02}
        optimizer.add_param_group(late)

    optimizer = made(model)
    for step in range(6):
        if step == 1:
            added(optimizer, model)
        model.get_submodule("0").requires_grad_(step != 2)
        if is_resumed and step in (3, 4):
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = problem()[0]
            optimizer = made(model)
            added(optimizer, model)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        if newton:
            optimizer.step([(x[part], y[part])])
        else:
            train(optimizer, model, lossfunc, x[part], y[part])
    return values(model)


def resumed(rank: int) -> list[tuple[Tensor, Tensor]]:
    group, part = distributed.group.WORLD, slice(0, 5) if rank == 0 else slice(5, 7)
    return [(trained(kind, part, group, False), trained(kind, part, group, True)) for kind in KINDS]


def test_states_of_processes_go_on_exactly(tmp_path: Path) -> None:
    wanted = [trained(kind, slice(None), None, False) for kind in KINDS]
    for found in on_ranks(resumed, tmp_path):
        for (through, again), one in zip(found, wanted, strict=True):
            assert torch.equal(through, again)
            assert torch.allclose(through, one, rtol=1e-8, atol=1e-8)


def alone_failing(rank: int) -> list[str]:
    """What is said where one process has no batch, or an error of its own, or no group."""
    group = distributed.group.WORLD
    model, _, x, y = problem()
    newton = GaussNewton(model, nn.CrossEntropyLoss(), process_group=group)
    texts = [said(lambda: newton.step([] if rank else [(x, y)]))]
    matrix = GGN(model, nn.CrossEntropyLoss(), [(x, y)], process_group=group)
    for _ in range(2):
        matrix @ torch.ones(matrix.shape[1])
    if rank:
        x.mul_(2)
    texts.append(said(lambda: matrix @ torch.ones(matrix.shape[1])))
    own = distributed.new_group([0])
    if rank:
        texts.append(said(lambda: KFAC(model, process_group=own)))
        texts.append(said(lambda: GaussNewton(model, nn.CrossEntropyLoss(), process_group=own)))
        texts.append(said(lambda: GGN(model, nn.CrossEntropyLoss(), [], process_group=own)))
    return texts


def test_nobody_waits_for_a_process_that_failed(tmp_path: Path) -> None:
    (empty, moved), (own_empty, own_moved, *no_member) = on_ranks(alone_failing, tmp_path)
    assert "Another process of the group" in empty
    assert "Another process of the group" in moved
    assert "gave no batch" in own_empty
    assert "Two passes over the loader differ" in own_moved
    assert all("is not in process_group" in text for text in no_member)
