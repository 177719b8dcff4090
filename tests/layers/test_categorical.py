"""Classes are drawn with their probabilities, from what ``torch.manual_seed`` seeds."""

from __future__ import annotations

import pytest
import torch

from backpack_layers.categorical import drawn
from backpack_products import tuning


def test_frequencies_are_probabilities() -> None:
    """Within five standard deviations, classes of probability zero at both ends and between."""
    torch.manual_seed(0)
    p = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    draws = 20_000
    labels = drawn(p, draws)
    assert labels.shape == (2, draws)
    found = torch.stack([row.bincount(minlength=6) for row in labels]) / draws
    error = (p * (1 - p) / draws).sqrt()
    assert ((found - p).abs() <= 5 * error).all()


@pytest.mark.host("a GPU draws in another way")
def test_a_rare_class_has_its_share() -> None:
    """Behind classes whose sum leaves it no digit in single precision."""
    torch.manual_seed(0)
    p = torch.tensor([[1.0, 1e-9, 1e-9]]).expand(4, 3)
    uniform = torch.tensor([[0.5], [1 - 1.5e-9], [1 - 0.5e-9], [0.0]], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *shape, **options: uniform)
        assert drawn(p, 1).flatten().tolist() == [0, 1, 2, 0]


def test_draws_do_not_depend_on_the_budget() -> None:
    p = torch.rand(50, 7)
    found = []
    before = tuning.memory_budget()
    for budget in (before, 1):
        torch.manual_seed(3)
        tuning.set_memory_budget(budget)
        try:
            found.append(drawn(p, 4))
        finally:
            tuning.set_memory_budget(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", [(0, 3), (2, 1)])
def test_nothing_to_choose_from(shape: tuple[int, int]) -> None:
    """No rows, or one class."""
    labels = drawn(torch.rand(shape), 3)
    assert labels.shape == (shape[0], 3)
    assert not labels.any()


def test_no_number_is_no_error() -> None:
    """What is computed with the class is no number, either, and shows it."""
    labels = drawn(torch.full((2, 3), float("nan")), 2)
    assert ((labels >= 0) & (labels < 3)).all()
