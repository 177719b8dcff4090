"""What is random is what it should be. Each statistical test says how often it fails by chance."""

from __future__ import annotations

import os
from math import sqrt

import pytest
import torch
from scipy import stats

from backpack_privacy import Clipping, randomness
from backpack_privacy.randomness import Seeded, Source, System
from backpack_privacy.sampling import Poisson, Shuffled, Units
from tests.privacy.problems import privately

ALARM = 1e-6  # with which probability a right program fails one of these tests


@pytest.mark.host("scipy")
@pytest.mark.parametrize("source", [System(), Seeded(0)])
def test_numbers_of_a_source(source: Source) -> None:
    """Kolmogorov-Smirnov tests; odd counts, empty tensors, other precisions."""
    normal = source.normal(torch.empty(20001))
    assert stats.kstest(normal.numpy(), "norm").pvalue > ALARM / 4
    uniform = source.uniform(20001)
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > ALARM / 4
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert not source.uniform(0).numel()
    assert source.normal(torch.empty(3, 0)).shape == (3, 0)
    half = source.normal(torch.empty(5, 3, dtype=torch.bfloat16))
    assert half.dtype is torch.bfloat16
    assert not torch.equal(half, source.normal(half))


def test_the_system_is_never_asked_for_the_same() -> None:
    assert not torch.equal(System().normal(torch.empty(9)), System().normal(torch.empty(9)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_that_is_forked_has_numbers_of_its_own() -> None:
    source, size = System(), torch.empty(9, dtype=torch.float64)
    source.normal(size)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, source.normal(size).numpy().tobytes())
        finally:
            os._exit(0)
    own = source.normal(size)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        theirs = torch.frombuffer(bytearray(file.read()), dtype=torch.float64)
    assert len(theirs) == 9
    assert not set(own.tolist()) & set(theirs.tolist())


@pytest.mark.host("scipy")
def test_several_tensors_share_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is drawn more often than it is used, and none is used twice."""
    monkeypatch.setattr(randomness, "_AT_ONCE", 7)
    source, draws, counts = System(), System._normal, list[int]()

    def noted(self: System, count: int) -> torch.Tensor:
        counts.append(count)
        return draws(self, count)

    monkeypatch.setattr(System, "_normal", noted)
    shapes = [(2, 3), (0, 4), (), (5, 6), (3,), (200, 10)]
    likes = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
    found = [*source.normals(likes)]
    assert [each.shape for each in found] == [like.shape for like in likes]
    every = torch.cat([each.flatten() for each in found])
    assert sum(counts) == len(every) == len(set(every.tolist()))
    assert max(counts) == 7
    assert stats.kstest(every.numpy(), "norm").pvalue > ALARM
    assert not [*source.normals([])]


@pytest.mark.host("scipy")
def test_noise_of_steps() -> None:
    """Standard deviation by parameter, no mean, no correlation between parameters.

    With samples whose gradients are zero, every change of a parameter is noise. Of each parameter,
    the sum of squares over all steps has a chi-squared distribution.
    """
    private, model, lossfunc = privately(
        noise_multiplier=2.0, clipping=Clipping(0.3, "per_layer"), checks=0
    )
    steps, found = 120, []
    before = [p.detach().clone() for p in model.parameters()]
    while private.steps < steps:
        for x, y in private.loader:
            private.step(0.0 * lossfunc(model(x), y))
            now = [p.detach().clone() for p in model.parameters()]
            found.append([(a - b).flatten() for a, b in zip(now, before, strict=True)])
            before = now
    deviation = 0.1 * 2.0 * 0.3 / 4  # rate, noise, sensitivity, expected number
    series = [torch.cat(part) / deviation for part in zip(*found, strict=True)]
    count = 2 * len(series) + 1
    for values in series:
        squares = float(values.square().sum())
        assert (
            2 * min(stats.chi2.cdf(squares, len(values)), stats.chi2.sf(squares, len(values)))
            > ALARM / count
        )
        assert stats.kstest(values.numpy(), "norm").pvalue > ALARM / count
    first, second = series[0][: len(series[2])], series[2][: len(series[0])]
    size = min(len(first), len(second))
    correlation = float(first[:size] @ second[:size]) / sqrt(size)
    assert 2 * stats.norm.sf(abs(correlation)) > ALARM / count


def test_poisson_batches() -> None:
    """Sizes have the binomial distribution (chi-squared test), each unit its share."""
    source, sampler = Seeded(5), Poisson(20, 2.0)
    batches = [batch for _ in range(300) for batch in sampler.epoch(source)]
    assert len(batches) == 3000
    sizes = torch.tensor([len(batch) for batch in batches]).bincount(minlength=21)
    assert sizes[0]
    expected = stats.binom.pmf(range(21), 20, 0.1) * 3000
    seen = [*sizes[:6].tolist(), int(sizes[6:].sum())]
    assert stats.chisquare(seen, [*expected[:6], expected[6:].sum()]).pvalue > ALARM / 2
    counts = torch.tensor([unit for batch in batches for unit in batch]).bincount()
    # Each count is binomial; together, nearly chi-squared.
    assert stats.chi2.sf(float(((counts - 300) ** 2 / 270).sum()), 20) > ALARM / 2


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_share_a_poisson_batch(world: int) -> None:
    whole = [*Poisson(20, 4.0).epoch(Seeded(1))]
    parts = [[*Poisson(20, 4.0, rank, world).epoch(Seeded(1))] for rank in range(world)]
    steps = [sorted(unit for part in step for unit in part) for step in zip(*parts, strict=True)]
    assert steps == whole


def test_shuffled_batches_have_everybody_once() -> None:
    sampler = Shuffled(11, 3.0)
    for _ in range(3):
        batches = [*sampler.epoch(System())]
        assert len(batches) == sampler.steps == 4
        assert sorted(unit for batch in batches for unit in batch) == [*range(11)]
    assert sampler.rate is None


def test_records_of_users() -> None:
    units = Units(7, ["a", "b", "a", "a", "c", "c", "a"], max_records=2)
    assert units.count == 3
    (draw,) = units.parts([0, 2], None, System())
    assert draw.units == 2
    assert len(draw.rows) == 4
    assert {*draw.rows[:2]} < {0, 2, 3, 6}
    assert draw.owners.tolist() == [0, 0, 1, 1]
    first, second = units.parts([0, 2], 2, System())
    assert (first.is_last, second.is_last) == (False, True)
    (empty,) = units.parts([], 2, System())
    assert (empty.rows, empty.is_last) == ([], True)


def test_empty_batches_take_a_step_of_noise() -> None:
    """The model never sees one, and the accountant counts it."""
    private, model, lossfunc = privately(size=1, noise_multiplier=1.0, checks=0)
    shown = 0
    for _ in range(4):
        for x, y in private.loader:
            assert len(x)
            shown += 1
            private.step(lossfunc(model(x), y))
    assert shown < private.steps == 48
    assert private.accountant.spent[0].count == 48
