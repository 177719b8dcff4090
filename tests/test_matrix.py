"""Every layer and every loss times extensions, reduction and batch size, or frozen parameters."""

from __future__ import annotations

import pytest
import torch

from backpack_core.extensions import DiagGGNMC
from backpack_core.plugins.registry import registry
from tests import oracle
from tests.cases import BATCHES, SETTINGS, Problem
from tests.layer_cases import LAYERS, LayerCase
from tests.loss_cases import LOSSES, LossCase

# Torch mentions that it pads once more where a "same" padding is asymmetric.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

# One Monte-Carlo estimate averages this many samples, and this many estimates are compared.
MC_SAMPLES = 200
MC_REPEATS = 20

layers = pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.id)
losses = pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
settings = pytest.mark.parametrize(("reduction", "batch"), SETTINGS)


def check_monte_carlo(problem: Problem) -> None:
    """The mean over repeats is within five standard errors of the exact diagonal."""
    exact = [d.sum(0).flatten() for d in problem.expected(oracle.ggn_diagonals)]
    draws = []
    for _ in range(MC_REPEATS):
        problem.run(DiagGGNMC(mc_samples=MC_SAMPLES))
        draws.append(torch.cat([d.flatten() for d in problem.fields("diag_ggn_mc")]))
    estimates = torch.stack(draws)
    mean, error = estimates.mean(0), estimates.std(0) / MC_REPEATS**0.5
    reference = torch.cat(exact)
    assert bool(((mean - reference).abs() <= 5 * error + 1e-12 * reference.max()).all())
    assert bool((error <= 0.1 * reference + 1e-3 * reference.max()).all()), (
        "too few samples to tell anything"
    )


FROZEN = [(case, name) for case in LAYERS for name, _ in case.make().named_parameters()]
# Of each type of layer. Columns are drawn at the loss: a layer does not know that they are.
KINDS = list({type(case.make()): case for case in reversed(LAYERS)}.values())


@pytest.mark.grid(4)
@layers
@settings
def test_layer(case: LayerCase, reduction: str, batch: int) -> None:
    case.problem(batch, reduction).check()


# Both reductions and both batch sizes; all pairs of them are tried without frozen parameters.
@pytest.mark.grid(4)
@pytest.mark.parametrize(("case", "name"), FROZEN, ids=lambda value: getattr(value, "id", value))
@pytest.mark.parametrize(("reduction", "batch"), SETTINGS[:: len(BATCHES) + 1])
def test_layer_with_frozen(case: LayerCase, name: str, reduction: str, batch: int) -> None:
    problem = case.problem(batch, reduction)
    frozen = problem.model.get_parameter(f"1.{name}")
    frozen.requires_grad_(False)
    problem.check()
    assert not hasattr(frozen, "grad_batch")


@layers
def test_layer_has_a_rule(case: LayerCase) -> None:
    assert not registry.resolve(case.make()).is_fallback


@losses
@settings
def test_loss(case: LossCase, reduction: str, batch: int) -> None:
    case.problem(batch, reduction).check()


@pytest.mark.grid(2)
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.id)
def test_layer_monte_carlo(case: LayerCase) -> None:
    if case.whole:  # every forward pass is another net: nothing to converge to
        assert isinstance(case.make(), torch.nn.Dropout)
        return
    check_monte_carlo(case.problem(2, "mean"))


@losses
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_monte_carlo(case: LossCase, reduction: str) -> None:
    problem = case.problem(3, reduction)
    check_monte_carlo(problem)
