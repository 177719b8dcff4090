"""A loss that is linear in its input has no curvature: said once, with the loss to use."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core.errors import BackpackWarning, UnsupportedError
from backpack_core.extensions import (
    EKFAC,
    GGNMP,
    HMP,
    KFLR,
    KFRA,
    BatchDiagGGNExact,
    BatchDiagHessian,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    GGNGram,
    SqrtGGNExact,
)
from tests import oracle
from tests.cases import Problem
from tests.secondorder.problems import hessians

GGN: dict[str, Any] = {
    "DiagGGNExact": DiagGGNExact,
    "BatchDiagGGNExact": BatchDiagGGNExact,
    "SqrtGGNExact": SqrtGGNExact,
    "KFLR": KFLR,
    "KFRA": KFRA,
    "EKFAC": lambda: EKFAC(mc_samples=None),
    "GGNGram": GGNGram,
    "GGNMP": GGNMP,
}


def _classes() -> Tensor:
    return torch.tensor([0, 2, 1, 1])


def _probabilities() -> Tensor:
    return torch.rand(4, 3).softmax(1)


# The loss, its target, what to use.
LOSSES = {
    "NLLLoss": (nn.NLLLoss, _classes, "CrossEntropyLoss"),
    "KLDivLoss": (lambda: nn.KLDivLoss(reduction="batchmean"), _probabilities, "CrossEntropyLoss"),
    "L1Loss": (nn.L1Loss, _probabilities, "HuberLoss or MSELoss"),
}


def _problem(loss: str) -> Problem:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.LogSoftmax(1))
    make, target, _ = LOSSES[loss]
    return Problem(model, (torch.randn(4, 3),), make(), target())


@pytest.mark.parametrize("extension", GGN)
@pytest.mark.parametrize("loss", LOSSES)
def test_one_warning(loss: str, extension: str) -> None:
    problem = _problem(loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        problem.run(GGN[extension]())
        problem.run(GGN[extension](), DiagGGNExact(savefield="another"))
    assert len(caught) == 1, [str(w.message) for w in caught]
    text = str(caught[0].message)
    assert issubclass(caught[0].category, BackpackWarning)
    assert loss in text
    assert "zero" in text
    assert LOSSES[loss][2] in text
    assert all(not field.any() for field in problem.fields("another"))


@pytest.mark.host("a default device has a line of its own")
@pytest.mark.parametrize("loss", LOSSES)
def test_the_warning_points_at_the_users_line(loss: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _problem(loss).run(DiagGGNExact())
    assert [w.filename.rsplit("/", 1)[-1] for w in caught] == ["cases.py"]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_hessian_is_not_zero(loss: str) -> None:
    """That of the log-softmax is there, and nothing is said."""
    problem = _problem(loss)
    blocks = problem.expected(hessians)
    problem.run(DiagHessian(), BatchDiagHessian(), HMP(), BatchGrad())
    for p, block in zip(problem.parameters, blocks, strict=True):
        diagonals = block.diagonal(dim1=1, dim2=2).reshape(-1, *p.shape)
        oracle.assert_close(p.diag_h_batch, diagonals)  # type: ignore[attr-defined]
        vectors = torch.randn(2, *p.shape)
        product = p.hmp(vectors).flatten(1)  # type: ignore[attr-defined]
        oracle.assert_close(product, vectors.flatten(1) @ block.sum(0))


def test_monte_carlo_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="CrossEntropyLoss"):
        _problem("NLLLoss").run(DiagGGNMC())


def test_cross_entropy_is_the_same_model_with_curvature() -> None:
    problem = _problem("NLLLoss")
    logits = Problem(problem.model[:3], problem.inputs, nn.CrossEntropyLoss(), problem.target)  # type: ignore[index]
    diagonals = [d.sum(0) for d in logits.expected(oracle.ggn_diagonals)]
    logits.run(DiagGGNExact())
    logits.compare("diag_ggn_exact", diagonals)
    assert all(d.any() for d in diagonals)
