"""A trained factor in front of a loss, as in uncertainty weighting, is no term beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchGrad, BatchL2Grad, ClippedSumGrad, DiagGGNExact
from tests.oracle import assert_close


class Weighted(nn.Module):
    """A net with trained weights of two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.s = nn.Parameter(torch.tensor(0.3))
        self.t = nn.Parameter(torch.tensor([0.2, -0.1]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).tanh())
        return found


x, y = torch.randn(5, 3, dtype=torch.double), torch.randn(5, 2, dtype=torch.double)
Loss = Callable[[Weighted, Any], Tensor]
FACTORS: dict[str, Loss] = {
    "exp(-s)": lambda m, loss: (-m.s).exp() * loss(m(x), y),
    "behind": lambda m, loss: loss(m(x), y) * (-m.s).exp(),
    "by itself": lambda m, loss: m.s * loss(m(x), y),
    "quotient": lambda m, loss: loss(m(x), y) / (2 * m.s.square()),
    "with a term": lambda m, loss: (-m.s).exp() * loss(m(x), y) + m.s,
    "two losses": lambda m, loss: (
        (-m.t[0]).exp() * loss(m(x), y) + (-m.t[1]).exp() * loss(m(x), y.flip(0)) + m.t.sum()
    ),
    "scaled": lambda m, loss: 0.5 * ((-m.s).exp() * loss(m(x), y)),
    "stacked": lambda m, loss: (
        (-m.t).exp() * torch.stack([loss(m(x), y), loss(m(x), y.flip(0))])
    ).sum(),
}


@pytest.mark.parametrize("extension", [BatchGrad, BatchL2Grad, lambda: ClippedSumGrad(1.0)])
@pytest.mark.parametrize("is_extended", [True, False])
@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_is_called_one(factor: str, is_extended: bool, extension: Any) -> None:
    model, lossfunc = extend(Weighted()), nn.MSELoss()
    if is_extended:
        extend(lossfunc)
    loss = FACTORS[factor](model, lossfunc)
    with pytest.raises(UnsupportedError) as caught, backpack(extension()):
        loss.backward()
    text = str(caught.value)
    assert "is a loss times a factor that depends on the parameter" in text
    assert "a term beside the loss" not in text


PENALTIES: dict[str, Loss] = {
    "penalty": lambda m, loss: loss(m(x), y) + m.s.square(),
    "scaled": lambda m, loss: 0.5 * (loss(m(x), y) + m.s.square()),
    "product of weights": lambda m, loss: loss(m(x), y) + (m.s * m.t).sum(),
    "of what is a factor in the net": lambda m, loss: (
        loss(m.t * m(x), y) + 0.1 * m.t.square().sum()
    ),
    "quotient by a number": lambda m, loss: (loss(m(x), y) + m.t.square().sum()) / 3,
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_stays_a_term(penalty: str) -> None:
    model, lossfunc = extend(Weighted()), extend(nn.MSELoss())
    loss = PENALTIES[penalty](model, lossfunc)
    with pytest.raises(UnsupportedError, match="a term beside the"), backpack(BatchGrad()):
        loss.backward()


def test_what_the_message_says_is_exact() -> None:
    """The sum last, and what is added handed over; or the factor kept out."""
    model, lossfunc = extend(Weighted()), extend(nn.MSELoss(reduction="none"))

    def losses(rows: slice) -> Tensor:
        found: Tensor = (-model.s).exp() * lossfunc(model(x[rows]), y[rows]).mean(1)
        return found

    penalty = 1 * model.s
    with backpack(BatchGrad(), beside=[penalty]):
        (losses(slice(None)).mean() + penalty).backward()
    for name, p in model.named_parameters():
        if name == "t":
            continue
        single = [torch.autograd.grad(losses(slice(n, n + 1)).sum() / 5, p)[0] for n in range(5)]
        assert_close(p.grad_batch, torch.stack(single))
    lossfunc = extend(nn.MSELoss())
    with backpack(BatchGrad(), DiagGGNExact()):
        ((-model.s).exp().detach() * lossfunc(model(x), y)).backward()
    assert_close(model.head.bias.diag_ggn_exact, (-model.s.detach()).exp().expand(2))


def test_curvature_says_to_detach_a_factor() -> None:
    model, lossfunc, s = (
        extend(Weighted()),
        extend(nn.MSELoss()),
        torch.zeros((), requires_grad=True),
    )
    loss = (-s).exp() * lossfunc(model(x), y)
    with pytest.raises(UnsupportedError, match=r"weight\.detach\(\)"), backpack(DiagGGNExact()):
        loss.backward()


class Fused(torch.autograd.Function):
    """A linear layer and a loss, whose forward pass computes the gradients of both operands."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            operands = [t.detach().requires_grad_() for t in (inputs, weight)]
            loss = (operands[0] @ operands[1].T - y).square().sum()
            ctx.save_for_backward(*torch.autograd.grad(loss, operands))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return tuple(grad * saved for saved in ctx.saved_tensors)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_loss_that_is_fused_with_the_head(is_trained: bool) -> None:
    """Exact if the head is frozen; else its gradient is a sum over samples."""
    model = extend(Weighted())
    model.head.requires_grad_(is_trained)
    loss = Fused.apply(model.body(x).tanh(), model.head.weight)
    if is_trained:
        with pytest.raises(UnsupportedError, match="as a fused loss does"), backpack(BatchGrad()):
            loss.backward()
        return
    with backpack(BatchGrad()):
        loss.backward()
    residual = model.body(x).tanh() @ model.head.weight.T - y
    grads = 2 * residual @ model.head.weight * (1 - model.body(x).tanh().square())
    assert_close(model.body.bias.grad_batch, grads)
