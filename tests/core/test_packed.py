"""Packed sequences are sorted by length, and put back into order behind the recurrent layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import BatchGrad, BatchL2Grad, DiagGGNExact, SumGradSquared
from tests.cases import Net

Read = Callable[[Any], Tensor]
READ: dict[str, Read] = {
    "last state": lambda out: out[1][-1],
    "mean": lambda out: pad_packed_sequence(out[0], batch_first=True)[0].sum(1),
    "tokens": lambda out: pad_packed_sequence(out[0], batch_first=True, total_length=4)[0],
    "both directions": lambda out: torch.cat(list(out[1]), 1),
}


VECTORS = ["last state", "mean", "both directions"]


def classify(net: Any, x: Tensor, lengths: list[int]) -> Tensor:
    x = x if net.is_raw else torch.tanh(net.embed(x))
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, state = net.recurrent(packed)
    state = state[0] if isinstance(state, tuple) else state
    result: Tensor = net.head(READ[net.read]((y, state)))
    return result


@pytest.mark.parametrize("lengths", [[4, 2, 3], [1, 3, 2, 2]])
@pytest.mark.parametrize("read", VECTORS)
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


@pytest.mark.parametrize("lengths", [[4, 4, 4, 4, 4], [2, 4, 1, 3, 3]])
@pytest.mark.parametrize("index", [[0, 1, 2, 3, 4], [0, 0, 1, 2, 1], [1, 0, 2, 4, 3]])
@pytest.mark.parametrize("read", VECTORS)
def test_several_sequences_of_one_sample(read: str, index: list[int], lengths: list[int]) -> None:
    """An index says which sequences belong to one sample; packing and padding move its rows."""
    if read == "both directions" and len({*lengths}) > 1 and index != [*range(5)]:
        read = "mean"  # backwards, states of zeros join the rows: their samples are not known
    two = read == "both directions"
    net: Any = Net(classify, embed=nn.Linear(2, 3), recurrent=nn.GRU(3, 2, batch_first=True,
                   bidirectional=two), head=nn.Linear(4 if two else 2, 2)).double()  # fmt: skip
    net.read, net.is_raw = read, False
    x, y = torch.randn(len(lengths), 4, 2).double(), torch.randint(2, (len(lengths),))
    lossfunc, parameters = nn.CrossEntropyLoss(reduction="sum"), list(net.parameters())
    expected = [torch.zeros(max(index) + 1, *p.shape).double() for p in parameters]
    for n, length in enumerate(lengths):
        loss = lossfunc(net(x[n : n + 1, :length], [length]), y[n : n + 1])
        for rows, gradient in zip(expected, torch.autograd.grad(loss, parameters), strict=True):
            rows[index[n]] += gradient
    extend(net), extend(lossfunc)
    with backpack(BatchGrad(), samples=torch.tensor(index)):
        lossfunc(net(x, lengths), y).backward()
    for p, rows in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.grad_batch, rows)  # type: ignore[attr-defined]


def _sliced(change: str, x: Tensor, net: Any) -> Tensor:
    """Rows that an operation in place changes, through a view."""
    hidden, out = torch.tanh(net.embed(x)), torch.zeros(4, 3, dtype=x.dtype)
    if change == "copied in another order":
        for n in range(4):
            out[n] = hidden[3 - n]
    elif change == "subtracted":
        out = hidden.clone()
        out[:2].sub_(hidden[2:])
    else:
        out = hidden.clone()
        out[1:3].mul_(-1)
    result: Tensor = net.head(out)
    return result


@pytest.mark.parametrize("change", ["copied in another order", "subtracted", "turned"])
def test_rows_written_in_place_through_views(change: str) -> None:
    """Entries that are copied are followed; where two samples meet, none is, but for an error."""
    net: Any = Net(lambda net, x: _sliced(change, x, net), embed=nn.Linear(2, 3),
                   head=nn.Linear(3, 2)).double()  # fmt: skip
    x, y, index = torch.randn(4, 2).double(), torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 1, 2])
    lossfunc, parameters = nn.CrossEntropyLoss(reduction="none"), list(net.parameters())
    losses = lossfunc(net(x), y)
    # The sample of each loss.
    owners = index.flip(0) if change == "copied in another order" else index
    expected = [torch.zeros(3, *p.shape).double() for p in parameters]
    for loss, owner in zip(losses, owners.tolist(), strict=True):
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        for rows, gradient in zip(expected, gradients, strict=True):
            rows[owner] += gradient
    extend(net), extend(total := nn.CrossEntropyLoss(reduction="sum"))
    loss = total(net(x), y)
    is_mixed = change == "subtracted"
    refused = pytest.raises(SampleMixingError) if is_mixed else nullcontext()
    with refused, backpack(BatchGrad(), samples=index):
        loss.backward()
    for p, rows in zip(parameters, expected, strict=True) if not is_mixed else ():
        torch.testing.assert_close(p.grad_batch, rows)  # type: ignore[attr-defined]


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2], [4], [1], [2, 2]])
@pytest.mark.parametrize("read", ["mean", "tokens"])
def test_as_many_rows_as_samples(read: str, lengths: list[int]) -> None:
    """Packed sequences of one step each have a row for each sample; one sample has no others."""
    net: Any = Net(classify, embed=nn.Linear(2, 3), recurrent=nn.LSTM(3, 2, batch_first=True),
                   head=nn.Linear(2, 2)).double()  # fmt: skip
    net.read, net.is_raw = read, False
    x = torch.randn(len(lengths), 4, 2).double()
    lossfunc, parameters = nn.CrossEntropyLoss(reduction="sum"), list(net.parameters())
    y = torch.randint(2, (len(lengths), 4) if read == "tokens" else (len(lengths),))

    def loss(x: Tensor, lengths: list[int], y: Tensor) -> Tensor:
        logits = net(x, lengths)
        return lossfunc(logits.mT if read == "tokens" else logits, y)  # type: ignore[no-any-return]

    one = (loss(x[n : n + 1], lengths[n : n + 1], y[n : n + 1]) for n in range(len(lengths)))
    rows = [torch.autograd.grad(each, parameters) for each in one]
    extend(net), extend(lossfunc)
    with backpack(BatchGrad(), SumGradSquared()):
        loss(x, lengths, y).backward()
    for p, each in zip(parameters, zip(*rows, strict=True), strict=True):
        expected = torch.stack(each)
        torch.testing.assert_close(p.grad_batch, expected)  # type: ignore[attr-defined]
        squares = expected.square().sum(0)
        torch.testing.assert_close(p.sum_grad_squared, squares)  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_one_padded_sequence(length: int) -> None:
    """With one sample, entries of padding belong to no other."""

    def tag(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(net.table(x), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(net.recurrent(packed)[0], True, total_length=4)
        result: Tensor = net.head(padded).mT
        return result

    net: Any = Net(tag, table=nn.Embedding(5, 3, padding_idx=0), head=nn.Linear(2, 3),
                   recurrent=nn.LSTM(3, 2, batch_first=True)).double()  # fmt: skip
    is_there = torch.arange(4) < length
    x, y = torch.tensor([[1, 2, 3, 4]]) * is_there, torch.tensor([[0, 1, 2, 0]])
    y = torch.where(is_there, y, -100)
    lossfunc = nn.CrossEntropyLoss(reduction="sum")
    extend(net), extend(lossfunc)
    with backpack(BatchGrad()):
        lossfunc(net(x, torch.tensor([length])), y).backward()
    for p in net.parameters():
        torch.testing.assert_close(p.grad_batch[0], p.grad)  # type: ignore[attr-defined]
