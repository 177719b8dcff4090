"""Several processes give what one gives on the joined batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from backpack_core import backpack, extend
from backpack_core.extensions import (
    EKFAC,
    KFLR,
    BatchDiagGGNExact,
    ClippedSumGrad,
    DiagGGNExact,
)
from backpack_data import Quantities, accumulate
from backpack_secondorder.over_data import Fisher
from tests.data.problems import DETERMINISTIC, assert_same, batches, data, expected, loss, net
from tests.data.workers import BOUND, KINDS, OPTIONS, SHARDED, start
from tests.versions import needs_shards

pytestmark = [
    pytest.mark.skipif(
        not distributed.is_available(), reason="this torch was built without torch.distributed"
    ),
    pytest.mark.host("gloo joins tensors of there"),
]


def run(name: str, folder: Path, ranks: int) -> None:
    for status, error in start(name, folder, ranks):
        assert status == 0, error


FOUR = pytest.param(4, marks=pytest.mark.long)  # each is a process that imports torch


@pytest.mark.parametrize("ranks", [1, 2, FOUR])
def test_one_pass_under_data_parallel(ranks: int, tmp_path: Path):
    wanted = expected([e() for e in DETERMINISTIC], *data())
    run("in_parallel", tmp_path, ranks)
    for number in range(len(OPTIONS)):
        for rank in range(ranks):
            found = torch.load(tmp_path / f"parallel-{number}-{rank}.pt", weights_only=False)
            assert found.keys() == wanted.keys()
            for place, value in found.items():
                assert_same(value, wanted[place])


@needs_shards
@pytest.mark.parametrize("ranks", [1, 2, FOUR])
def test_one_pass_in_shards(ranks: int, tmp_path: Path):
    wanted = expected([e() for e in DETERMINISTIC], *data())
    run("in_shards", tmp_path, ranks)
    for rank in range(ranks):
        for number in range(len(SHARDED)):
            found = torch.load(tmp_path / f"shards-{number}-{rank}.pt", weights_only=False)
            assert found.keys() == wanted.keys()
            for place, value in found.items():
                assert_same(value, wanted[place])
        found = torch.load(tmp_path / f"mixed-{rank}.pt", weights_only=False)
        assert len(found) == len(wanted) - 6
        for place, value in found.items():
            assert_same(value, wanted[place], 1e-5)


@needs_shards
def test_what_is_drawn_and_what_has_a_threshold(tmp_path: Path):
    run("others_in_shards", tmp_path, 2)
    exact = expected([KFLR(), DiagGGNExact(), BatchDiagGGNExact()], *data())
    clipped = expected([ClippedSumGrad(BOUND)], *data(), "sum")
    fields = {
        "kfac": "kflr",
        "diag_ggn_mc": "diag_ggn_exact",
        "diag_ggn_mc_batch": "diag_ggn_exact_batch",
    }
    for rank in range(2):
        drawn = torch.load(tmp_path / f"drawn-{rank}.pt", weights_only=False)
        assert len(drawn) == len(exact)
        for (path, field), value in drawn.items():  # in expectation, from thousands of draws
            assert_same(value, exact[path, fields[field]], 0.1)
        found = torch.load(tmp_path / f"clipped-{rank}.pt", weights_only=False)
        assert found.keys() == clipped.keys()
        for place, value in found.items():
            assert_same(value, clipped[place])


def test_operators(tmp_path: Path):
    run("operators", tmp_path, 2)
    for name, kind in KINDS.items():
        matrix = kind(net(), loss(), [data(8)])
        wanted = matrix @ torch.eye(matrix.shape[0], 3, dtype=torch.float64)
        for rank in range(2):
            found = torch.load(tmp_path / f"operators-{rank}.pt")
            assert_same(found[name], wanted)
    in_turn = Fisher(net(), loss(), batches(*data(8), 3, 1, 3, 1))
    sampled = in_turn @ torch.eye(in_turn.shape[0], 3, dtype=torch.float64)
    for rank in range(2):  # the same draws: the batches are dealt in turn
        assert_same(torch.load(tmp_path / f"operators-{rank}.pt")["sampled"], sampled)


@needs_shards
@pytest.mark.parametrize("ranks", [2, FOUR])
def test_over_data_in_shards(ranks: int, tmp_path: Path):
    run("over_data_in_shards", tmp_path, ranks)
    wanted = accumulate(net(), loss(ignored=-100), [data(10)], EKFAC(None), progress=False)
    one_pass = expected([e() for e in DETERMINISTIC], *data(10), ignored=-100)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"in-shards-{rank}.pt", weights_only=False)
        assert found
        for place, value in found.items():
            if place[1] == "ekfac":  # eigenvectors have no sign
                assert_same(value.dense(), wanted[place].dense())
            else:
                assert_same(value, one_pass[place])


@pytest.mark.parametrize("ranks", [1, FOUR])
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


@pytest.mark.parametrize(
    "name", ["killed", pytest.param("killed_in_shards", marks=[pytest.mark.long, needs_shards])]
)
def test_a_killed_rank_is_named_and_the_rest_goes_on(name: str, tmp_path: Path):
    first, second = start(name, tmp_path, 2)
    assert second[0] == -9
    assert first[0] == 1
    assert "LostProcessError: Rank 1 has not finished" in first[1]
    run(name, tmp_path, 2)
    model, lossfunc = extend(net()), extend(loss(ignored=-100))
    x, y = data(8)
    value = lossfunc(model(x), y)
    with backpack(*[e() for e in DETERMINISTIC[2:5]]):
        value.backward()
    for rank in range(2):
        for (path, field), got in Quantities.load(tmp_path / f"killed-{rank}.saved").items():
            assert_same(got, getattr(model.get_parameter(path), field))


@pytest.mark.parametrize(
    "name",
    [
        "without_weight_accumulated",
        pytest.param("without_weight_in_shards", marks=needs_shards),
        "without_weight_combined",
        "without_weight_reduced",
        "unreadable",
        "other_state",
    ],
)
def test_all_ranks_learn_what_has_failed_on_one(name: str, tmp_path: Path):
    """At once, and not when they have waited for ten minutes."""
    (first, told), (second, said) = start(name, tmp_path, 2)
    assert first == second == 1, (told, said)
    causes = {"unreadable": "Error", "other_state": "is the state of another run"}
    cause = causes.get(name, "which are zero in this one")
    assert cause in said
    assert "Rank" not in said
    assert "LostProcessError: Rank 1 failed" in told
    assert cause in told
    for file in tmp_path.glob("*.seconds"):
        assert float(file.read_text()) < 60
