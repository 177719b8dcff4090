"""The gradient of a loss, as propagators of plugins begin with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backpack_core import View, backpack, extend
from backpack_core.extensions import BatchGrad
from backpack_products.loss import loss_gradient
from backpack_products.some_samples import subsample
from tests import oracle


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("indices", [None, [2, 0]])
def test_gradient_of_each_sample(reduction: str, indices: list[int] | None) -> None:
    model = extend(nn.Linear(3, 4).double())
    lossfunc = extend(nn.CrossEntropyLoss(reduction=reduction))
    output, y = model(torch.randn(5, 3, dtype=torch.float64)), torch.tensor([0, 3, 1, 1, 2])
    expected = torch.autograd.grad(2 * lossfunc(output, y), output, retain_graph=True)[0]
    found: list[Tensor] = []

    def observe(view: View) -> None:
        if view.call.rule.is_loss:
            chosen = view if indices is None else subsample(view, indices)
            found.append(loss_gradient(chosen))

    with backpack(BatchGrad(), observer=observe):
        (2 * lossfunc(output, y)).backward()
    (ours,) = found
    oracle.assert_close(ours, expected if indices is None else expected[indices])
