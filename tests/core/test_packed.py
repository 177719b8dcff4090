"""Packed sequences are sorted by length, and put back into order behind the recurrent layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from backpack_core import backpack, extend
from backpack_core.extensions import BatchGrad, BatchL2Grad, DiagGGNExact
from tests.cases import Net

Read = Callable[[Any], Tensor]
READ: dict[str, Read] = {
    "last state": lambda out: out[1][-1],
    "mean": lambda out: pad_packed_sequence(out[0], batch_first=True)[0].sum(1),
    "both directions": lambda out: torch.cat(list(out[1]), 1),
}


def classify(net: Any, x: Tensor, lengths: list[int]) -> Tensor:
    x = x if net.is_raw else torch.tanh(net.embed(x))
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, state = net.recurrent(packed)
    state = state[0] if isinstance(state, tuple) else state
    result: Tensor = net.head(READ[net.read]((y, state)))
    return result


@pytest.mark.parametrize("lengths", [[4, 2, 3], [1, 3, 2, 2]])
@pytest.mark.parametrize("read", READ)
def test_sequences_in_any_order(read: str, lengths: list[int]) -> None:
    two = read == "both directions"
    net: Any = Net(classify, embed=nn.Linear(2, 3), recurrent=nn.GRU(3, 2, bidirectional=two),
                   head=nn.Linear(4 if two else 2, 2)).double()  # fmt: skip
    net.read, net.is_raw = read, False
    x, y = torch.randn(len(lengths), 4, 2).double(), torch.randint(2, (len(lengths),))
    lossfunc, parameters = nn.CrossEntropyLoss(reduction="sum"), list(net.parameters())
    gradients, diagonals = [], [torch.zeros_like(p) for p in parameters]
    for n, length in enumerate(lengths):
        logits = net(x[n : n + 1, :length], [length])
        loss = lossfunc(logits, y[n : n + 1])
        gradients.append(torch.autograd.grad(loss, parameters, retain_graph=True))
        hessian = torch.func.hessian(lossfunc)(logits.detach(), y[n : n + 1])[0, :, 0]
        jacobian = [
            torch.autograd.grad(logit, parameters, retain_graph=True) for logit in logits[0]
        ]
        for k, diagonal in enumerate(diagonals):
            rows = torch.stack([row[k] for row in jacobian])
            diagonal += torch.einsum("i...,ij,j...->...", rows, hessian, rows)
    extend(net), extend(lossfunc)
    with backpack(BatchGrad(), BatchL2Grad(), DiagGGNExact()):
        lossfunc(net(x, lengths), y).backward()
    for k, p in enumerate(parameters):
        expected = torch.stack([gradient[k] for gradient in gradients])
        torch.testing.assert_close(p.grad_batch, expected)  # type: ignore[attr-defined]
        squares = expected.flatten(1).square().sum(1)
        torch.testing.assert_close(p.batch_l2, squares)  # type: ignore[attr-defined]
        torch.testing.assert_close(p.diag_ggn_exact, diagonals[k])  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("lengths", [[4, 2, 3], [3, 1, 2], [3, 1, 2, 2]])
@pytest.mark.parametrize("read", ["mean", "both directions"])
def test_data_that_go_backwards(read: str, lengths: list[int], kind: Any) -> None:
    # The longest sequence begins; the others join it with a first state of zeros.
    net: Any = Net(
        classify, recurrent=kind(2, 3, bidirectional=True), head=nn.Linear(6, 2)
    ).double()
    net.read, net.is_raw = read, True
    x, y = torch.randn(len(lengths), 4, 2).double(), torch.randint(2, (len(lengths),))
    lossfunc, parameters = nn.CrossEntropyLoss(reduction="sum"), list(net.parameters())
    losses = [
        lossfunc(net(x[n : n + 1, :length], [length]), y[n : n + 1])
        for n, length in enumerate(lengths)
    ]
    gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
    extend(net), extend(lossfunc)
    with backpack(BatchGrad()):
        lossfunc(net(x, lengths), y).backward()
    for k, p in enumerate(parameters):
        expected = torch.stack([gradient[k] for gradient in gradients])
        torch.testing.assert_close(p.grad_batch, expected)  # type: ignore[attr-defined]


def test_a_state_of_zeros_goes_with_sorted_rows() -> None:
    """With frozen recurrent weights, nothing tells zeros from data: they are as long as a batch."""
    net: Any = Net(classify, recurrent=nn.LSTM(2, 3, batch_first=True), head=nn.Linear(3, 2))
    net.double().recurrent.weight_hh_l0.requires_grad_(False)
    net.read, net.is_raw = "last state", True
    x, lengths = torch.randn(3, 4, 2).double(), [1, 1, 4]
    parameters = [p for p in net.parameters() if p.requires_grad]
    losses = [net(x[n : n + 1], lengths[n : n + 1]).square().sum() for n in range(3)]
    rows = [torch.autograd.grad(loss, parameters) for loss in losses]
    extend(net)
    with backpack(BatchGrad()):
        net(x, lengths).square().sum().backward()
    for p, each in zip(parameters, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(p.grad_batch, torch.stack(each))
