"""What is done to a loss before ``backward()`` is called on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import Extension, backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import GGNMP, KFAC, BatchGrad, DiagGGNExact, DiagHessian
from tests import oracle
from tests.cases import Net, Problem

N = 3
NONLINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda loss: loss.sum().sqrt(),
    "square": lambda loss: loss.sum() ** 2,
    "product": lambda loss: loss.sum() * loss.sum(),
    "log": lambda loss: (1 + loss.sum()).log(),
    "logsumexp": lambda loss: loss.logsumexp(0),
    "ratio": lambda loss: 1 / (1 + loss.sum()),
}
LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda loss: loss.sum() * 3,
    "divided": lambda loss: loss.sum() / torch.tensor(7.0),
    "weighted": lambda loss: (torch.tensor([1.0, 2.0, 0.5]) * loss).sum(),
    "twice": lambda loss: loss.sum() + 2 * loss.mean(),
    "selected": lambda loss: loss[:2].sum(),
}


def _parts(outer: Callable[[Tensor], Tensor]) -> tuple[Problem, Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(N, 3), torch.randint(0, 3, (N,))
    plain = Net(lambda _, out, target: outer(F.cross_entropy(out, target, reduction="none")))
    problem = Problem(model, (x,), plain, y)
    lossfunc = extend(nn.CrossEntropyLoss(reduction="none"))
    return problem, outer(lossfunc(extend(model)(x), y))


@pytest.mark.parametrize("extension", [DiagGGNExact, DiagHessian, KFAC, GGNMP])
@pytest.mark.parametrize("name", NONLINEAR)
def test_curvature_of_a_function_of_the_loss(name: str, extension: Callable[[], Extension]) -> None:
    _, loss = _parts(NONLINEAR[name])
    message = "is applied to an extended loss before backward"
    with pytest.raises(UnsupportedError, match=message), backpack(extension()):
        loss.backward()


@pytest.mark.parametrize("name", LINEAR)
def test_curvature_of_a_weighted_sum(name: str) -> None:
    problem, loss = _parts(LINEAR[name])
    with backpack(DiagGGNExact()):
        loss.backward()
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.compare("diag_ggn_exact", expected)


@pytest.mark.parametrize("name", NONLINEAR)
def test_gradients_of_a_function_of_the_loss(name: str) -> None:
    """The gradient of the whole has a part for each sample: what goes through its rows."""
    problem, loss = _parts(NONLINEAR[name])
    with backpack(BatchGrad()):
        loss.backward()
    for parameter in problem.parameters:
        oracle.assert_close(parameter.grad_batch.sum(0), parameter.grad)  # type: ignore[attr-defined]
