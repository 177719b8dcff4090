"""Several processes give what one gives on the joined batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from backpack_core import backpack, extend
from tests.data.problems import DETERMINISTIC, assert_same, data, expected, loss, net
from tests.data.workers import OPTIONS, start

pytestmark = pytest.mark.skipif(
    not distributed.is_available(), reason="this torch was built without torch.distributed"
)


def run(name: str, folder: Path, ranks: int) -> None:
    for status, error in start(name, folder, ranks):
        assert status == 0, error


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_pass_under_data_parallel(ranks: int, tmp_path: Path):
    wanted = expected([e() for e in DETERMINISTIC], *data())
    run("in_parallel", tmp_path, ranks)
    for number in range(len(OPTIONS)):
        for rank in range(ranks):
            found = torch.load(tmp_path / f"parallel-{number}-{rank}.pt", weights_only=False)
            assert number or found.keys() == wanted.keys()
            for place, value in found.items():
                assert_same(value, wanted[place])


@pytest.mark.parametrize("ranks", [1, 4])
def test_over_data_without_what_the_sampler_repeats(ranks: int, tmp_path: Path):
    run("over_data", tmp_path, ranks)
    asked = [e() for e in DETERMINISTIC]
    model, lossfunc = extend(net()), extend(loss(ignored=-100))
    x, y = data(10)
    value = lossfunc(model(x), y)
    with backpack(*asked):
        value.backward()
    for rank in range(ranks):
        found = torch.load(tmp_path / f"data-{rank}.pt", weights_only=False)
        assert found
        for (path, name), got in found.items():
            assert_same(got, getattr(model.get_parameter(path), name))


def test_a_killed_rank_is_named_and_the_rest_goes_on(tmp_path: Path):
    first, second = start("killed", tmp_path, 2)
    assert second[0] == -9
    assert first[0] == 1
    assert "LostProcessError: Rank 1 has not been through" in first[1]
    run("killed", tmp_path, 2)
    model, lossfunc = extend(net()), extend(loss(ignored=-100))
    x, y = data(8)
    value = lossfunc(model(x), y)
    with backpack(*[e() for e in DETERMINISTIC[2:5]]):
        value.backward()
    for rank in range(2):
        for (path, name), got in torch.load(
            tmp_path / f"killed-{rank}.pt", weights_only=False
        ).items():
            assert_same(got, getattr(model.get_parameter(path), name))
