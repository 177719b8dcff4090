"""The exact quantities of one backward pass, all at once, and their values by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from backpack_core import Extension
from backpack_core.extensions import (
    BatchGrad,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    SumGradSquared,
)
from tests import oracle
from tests.cases import Problem

# Gradients and what is made of them; curvature with all columns at once, and with one at a time.
KINDS = ("gradients", "curvature", "columns")

# Applies a function of ``tests.oracle`` to every parameter, as ``Problem.expected`` does.
Oracle = Callable[[Callable[..., list[Tensor]]], list[Tensor]]


@dataclass
class Expectation:
    """What a backward pass should leave behind.

    Attributes:
        extensions: What to run.
        fields: The value of each field (and of ``grad``), for every parameter.
    """

    extensions: list[Extension]
    fields: dict[str, list[Tensor]]

    def compare(self, parameters: Iterable[Tensor], rtol: float = 1e-10) -> None:
        """Compare all fields; tensors that are no leaves have no ``grad`` to compare."""
        for position, parameter in enumerate(parameters):
            for field, values in self.fields.items():
                if field == "grad" and not parameter.is_leaf:
                    continue
                found = getattr(parameter, field, None)
                assert found is not None, f"{field} of parameter {position} is missing"
                try:
                    oracle.assert_close(found, values[position], rtol)
                except AssertionError as error:
                    raise AssertionError(f"{field} of parameter {position}: {error}") from None

    def absent(self, parameters: Iterable[Tensor]) -> None:
        """Assert that no extension stored anything on these."""
        for parameter in parameters:
            for extension in self.extensions:
                assert not hasattr(parameter, extension.savefield)


def expect(compute: Oracle, kind: str) -> Expectation:
    """The expectation of one of :data:`KINDS`.

    Args:
        compute: The method ``expected`` of a problem, or something like it.
        kind: Which.
    """
    gradients = compute(oracle.individual_gradients)
    fields = {"grad": [g.sum(0) for g in gradients]}
    if kind != "gradients":
        fields["diag_ggn_exact"] = [d.sum(0) for d in compute(oracle.ggn_diagonals)]
        return Expectation([DiagGGNExact(chunk_size=1 if kind == "columns" else None)], fields)
    bound = middle(gradients)
    extensions = [
        BatchGrad(),
        BatchL2Grad(),
        SumGradSquared(),
        ClippedSumGrad(bound, normaliser=None),
    ]
    fields["grad_batch"] = gradients
    fields["batch_l2"] = [g.flatten(1).square().sum(1) for g in gradients]
    fields["sum_grad_squared"] = [g.square().sum(0) for g in gradients]
    fields["grad_clipped"] = clipped(gradients, bound)
    return Expectation(extensions, fields)


def check(problem: Problem, kind: str, **options: Any) -> None:
    """One forward and one backward pass, compared with the oracle."""
    expectation = expect(problem.expected, kind)
    problem.run(*expectation.extensions, **options)
    expectation.compare(problem.parameters, problem.rtol)


def norms(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of each sample's gradient over all parameters. Shape ``[N]``."""
    squares = sum(g.flatten(1).square().sum(1) for g in gradients)
    assert isinstance(squares, Tensor)
    return squares.sqrt()


def middle(gradients: Sequence[Tensor]) -> float:
    """A bound that clips some samples and not others."""
    return float(norms(gradients).median())


def clipped(gradients: Sequence[Tensor], bound: float) -> list[Tensor]:
    """The sums of individual gradients ``[N, *θ]``, clipped by their norm over all parameters."""
    factors = (bound / norms(gradients)).clamp(max=1.0)
    return [(factors.reshape(-1, *[1] * (g.dim() - 1)) * g).sum(0) for g in gradients]
