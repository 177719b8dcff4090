"""The diagonal of the Hessian where samples lie behind an axis that is as long as the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import BatchDiagHessian, DiagHessian
from tests.cases import Net
from tests.oracle import assert_close

MEMBERS = 4

NONLINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": lambda h: h.sin().mean(0),
    "softmax": lambda h: h.softmax(2).mean(0),
    "softmax, log": lambda h: h.softmax(2).mean(0).log(),
    "norm": lambda h: h.norm(dim=2, keepdim=True).mean(0),
    "product": lambda h: (h * h.cos()).sum(0),
    "module": lambda h: nn.functional.layer_norm(h, (2,)).sin().mean(0),
}


def diagonal(loss: Tensor, parameter: Tensor) -> Tensor:
    """By plain double backward, entry by entry."""
    (gradient,) = torch.autograd.grad(loss, parameter, create_graph=True)
    entries = [
        torch.autograd.grad(entry, parameter, retain_graph=True)[0].flatten()[n]
        for n, entry in enumerate(gradient.flatten())
    ]
    return torch.stack(entries).reshape(parameter.shape)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("samples", [MEMBERS, 2, 3])
@pytest.mark.parametrize("name", NONLINEAR)
def test_an_ensemble_in_front(name: str, samples: int) -> None:
    """As in BatchEnsemble: each member scales what all of them receive."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(net.first(x.unsqueeze(0) * net.gains) * net.others)
        return NONLINEAR[name](net.last(hidden))

    gains, others = (nn.Parameter(torch.randn(MEMBERS, 1, n)) for n in (3, 4))
    parts = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 2)}
    net = Net(forward, **parts, gains=gains, others=others)
    model, lossfunc, x = extend(net), extend(nn.MSELoss()), torch.randn(samples, 3)
    output = model(x)
    loss = lossfunc(output, torch.zeros_like(output))
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = [diagonal(loss, p) for p in parameters]
    with backpack(DiagHessian(), BatchDiagHessian()):
        loss.backward()
    for p, exact in zip(parameters, expected, strict=True):
        ours: Any = p
        assert_close(ours.diag_h, exact)
        assert_close(ours.diag_h_batch.sum(0), exact)
