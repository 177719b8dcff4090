"""Several losses in one pass: each known for what it is, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backpack_core import Extension, backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import (  # type: ignore[attr-defined]
    GGNMP,
    HMP,
    KFAC,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchGrad,
    DiagGGNExact,
    DiagHessian,
)
from tests import oracle

CURVATURE: dict[str, Callable[[], Extension]] = {
    "diagonal": DiagGGNExact,
    "of each sample": BatchDiagGGNExact,
    "Hessian": DiagHessian,
    "Kronecker": KFAC,
    "recursion": KFRA,
    "products": GGNMP,
    "positive products": PCHMP,
    "products of some samples": lambda: HMP(subsampling=[0]),
}


def loss_of_a_loss(model: nn.Module) -> Callable[[], Tensor]:
    """The squares of squares; both losses are extended."""
    first, second = extend(nn.MSELoss(reduction="none")), extend(nn.MSELoss(reduction="sum"))
    x, y, z = torch.randn(4, 3), torch.randn(4, 2), torch.randn(4, 2)

    def loss() -> Tensor:
        result: Tensor = second(first(model(x), y), z)
        return result

    return loss


@pytest.mark.parametrize("name", CURVATURE)
def test_loss_of_a_loss(name: str) -> None:
    loss = loss_of_a_loss(extend(nn.Linear(3, 2)))
    refused = pytest.raises(UnsupportedError, match="another loss is computed from its output")
    with refused, backpack(CURVATURE[name]()):
        loss().backward()


def test_loss_of_a_loss_where_it_does_not_matter() -> None:
    model = extend(nn.Linear(3, 2, bias=False))
    loss = loss_of_a_loss(model)
    with backpack(BatchGrad(), HMP()):
        value = loss()
        value.backward()
    weight = model.weight
    (gradient,) = torch.autograd.grad(loss(), weight, create_graph=True)
    oracle.assert_close(weight.grad_batch.sum(0), gradient.detach())  # type: ignore[attr-defined]
    vector = torch.randn_like(weight)
    (product,) = torch.autograd.grad(gradient, weight, vector)
    oracle.assert_close(weight.hmp(vector), product)  # type: ignore[attr-defined]
