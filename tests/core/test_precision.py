"""Quantities in lower and in mixed precision."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from backpack_core import backpack
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests import oracle
from tests.cases import Net, classification


def test_autocast() -> None:
    """Within the precision of bfloat16, and in the dtype of the parameter's gradient."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )
    problem = classification(model, (8,), 6, 4)
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.rtol = 0.1
    with torch.autocast("cpu", torch.bfloat16):
        loss = problem.loss()
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    for p in problem.parameters:
        assert p.grad_batch.dtype == p.diag_ggn_exact.dtype == torch.float32  # type: ignore[attr-defined]
    problem.compare("grad_batch", gradients)
    problem.compare("diag_ggn_exact", diagonals)


def test_autocast_with_functions_between() -> None:
    torch.set_default_dtype(torch.float32)
    model = Net(
        lambda net, x: net.b(F.silu(net.a(x)) + torch.sin(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 4)
    )
    problem = classification(model, (8,), 6, 4)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.rtol = 0.1
    with torch.autocast("cpu", torch.bfloat16):
        loss = problem.loss()
    with backpack(DiagGGNExact()):
        loss.backward()
    problem.compare("diag_ggn_exact", diagonals)


def test_modules_of_different_precision() -> None:
    model = Net(
        lambda net, x: net.b(net.a(x).double()), a=nn.Linear(3, 4).float(), b=nn.Linear(4, 3)
    )
    problem = classification(model, (3,))
    problem.inputs = (problem.inputs[0].float(),)
    problem.rtol = 1e-5
    problem.check()
