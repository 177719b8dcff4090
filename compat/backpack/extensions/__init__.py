"""The extensions, and the incumbent's submodules of this package."""

from __future__ import annotations

from backpack.extensions import layout
from backpack.extensions.builtin import (
    GGNMP,
    HBP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)

__all__ = [
    "GGNMP",
    "HBP",
    "HMP",
    "KFAC",
    "KFLR",
    "KFRA",
    "PCHMP",
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDiagHessian",
    "BatchGrad",
    "BatchL2Grad",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "SqrtGGNExact",
    "SqrtGGNMC",
    "SumGradSquared",
    "Variance",
]

layout.fill()
