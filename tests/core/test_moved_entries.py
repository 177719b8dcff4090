"""Operations between modules that put entries of samples elsewhere: it is known whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError
from backpack_core.extensions import (
    KFLR,
    BatchGrad,
    DiagGGNExact,
)
from tests import oracle
from tests.cases import Net
from tests.owned_rows import check_owned_rows

D, C = 4, 3
Move = Callable[[Tensor], Tensor]

# From hidden states [N, T, D].
MOVES: dict[str, Move] = {
    "time first, merged": lambda h: h.transpose(0, 1).flatten(0, 1),
    "time first": lambda h: h.transpose(0, 1),
    "permuted": lambda h: h.permute(1, 0, 2).contiguous(),
    "turned": lambda h: h.flatten(1).t().view(h.shape[1], D, len(h)).transpose(1, 2),
    "steps stacked": lambda h: torch.stack([step.tanh() for step in h.unbind(1)]),
    "steps joined": lambda h: torch.cat([h[:, t] for t in range(h.shape[1])]),
    "first and last step": lambda h: torch.cat([h[:, 0], h[:, -1]]),
    "backwards": lambda h: h.transpose(0, 1).flip(0),
    "rolled": lambda h: h.roll(1, 1).transpose(0, 1),
    "some steps": lambda h: h.transpose(0, 1)[1:].flatten(0, 1),
    "gathered": lambda h: h.transpose(0, 1).gather(0, torch.zeros(1, len(h), D, dtype=torch.long)),
    "indexed": lambda h: h.transpose(0, 1)[[-1, 0]].flatten(0, 1),
    "parts exchanged": lambda h: torch.cat(h.transpose(0, 1).flatten(0, 1).chunk(2)[::-1]),
    "summed over time": lambda h: h.transpose(0, 1).sum(0),
    "running sums": lambda h: h.transpose(0, 1).cumsum(0),
    "draws": lambda h: h.mean(1).repeat(2, 1),
    "normalised": lambda h: F.layer_norm(h.transpose(0, 1), (D,)),
    "softmax": lambda h: h.transpose(0, 1).softmax(2),
    "padded in time": lambda h: F.pad(h, (0, 0, 1, 0)).transpose(0, 1),
    "sample after sample": lambda h: torch.cat([sample[: 1 + n % 2] for n, sample in enumerate(h)]),
}


def net(move: Move) -> nn.Module:
    return Net(
        lambda net, x: net.c(torch.tanh(net.b(move(torch.tanh(net.a(x)))))).flatten(0, -2),
        **{"a": nn.Linear(2, D), "b": nn.Linear(D, D), "c": nn.Linear(D, C)},
    ).double()


@pytest.mark.grid(4)
@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize(("samples", "steps"), [(3, 2), (3, 3), (2, 4), (1, 3)])
@pytest.mark.parametrize("name", MOVES)
def test_moved_entries(name: str, samples: int, steps: int, is_module: bool) -> None:
    move, x = MOVES[name], torch.randn(samples, steps, 2).double()
    model = net(move)
    parameters, logits = [*model.parameters()], model(x)
    y = torch.randint(0, C, (len(logits),))
    numbers = torch.arange(samples)[:, None, None].double().expand(samples, steps, D)
    ones = torch.ones_like(numbers)
    is_value = name in ("normalised", "softmax", "steps stacked", "padded in time")
    moved = [MOVES["time first"](t) if is_value else move(t) for t in (numbers, ones)]
    owners = (moved[0] / moved[1])[..., 0].flatten().round().long()
    if name == "padded in time":
        owners = torch.arange(samples).repeat(1 + steps)
    check_owned_rows(model, x, y, logits, owners, parameters, is_module)


MIXED: dict[str, Move] = {
    "over samples": lambda h: h.transpose(0, 1).softmax(1),
    "next sample": lambda h: h.transpose(0, 1)[:, 1:] - h.transpose(0, 1)[:, :-1],
    "sums over samples": lambda h: h.transpose(0, 1).cumsum(1),
    "one axis and the other": lambda h: h.transpose(0, 1) + h,
    "normalised": lambda h: F.layer_norm(h.transpose(0, 1), h.shape[::2]),
    "means of samples": lambda h: h.transpose(0, 1).mean(1),
    "signs that cancel": lambda h: h.transpose(0, 1) - h.transpose(0, 1).mean(1, keepdim=True),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize(
    ("extension", "is_module"), [(BatchGrad, True), (BatchGrad, False), (DiagGGNExact, True)]
)
def test_what_mixes(name: str, is_module: bool, extension: type) -> None:
    x = torch.randn(3, 3, 2).double()
    logits = extend(net(MIXED[name]))(x)
    y = torch.randint(0, C, (len(logits),))
    lossfunc = extend(nn.CrossEntropyLoss()) if is_module else F.cross_entropy
    with pytest.raises(SampleMixingError), backpack(extension()):
        lossfunc(logits, y).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_of_many_samples_in_any_precision(dtype: torch.dtype) -> None:
    model, x = nn.Linear(2, D).to(dtype), torch.randn(300, 2, 2).to(dtype)
    head = nn.Linear(D, C).to(dtype)

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(torch.stack(net.a(x).unbind(1)).flatten(0, 1))  # type: ignore[no-any-return]

    both = extend(Net(forward, a=model, b=head))
    with backpack(BatchGrad()):
        both(x).sum().backward()
    assert (vars(head.bias)["grad_batch"] == 2).all()
    expected = torch.stack([model(row).sum(0) for row in x])[:, None].expand(-1, C, -1)
    torch.testing.assert_close(vars(head.weight)["grad_batch"], expected)


@pytest.mark.parametrize(("samples", "steps"), [(3, 2), (3, 3), (1, 3)])
def test_kronecker_factors_of_a_head_behind_stacked_steps(samples: int, steps: int) -> None:
    """The same as with samples in front, whichever nodes the head's rows went through."""
    x, y = torch.randn(samples, steps, 2).double(), torch.randint(C, (samples, steps))
    first, head = nn.Linear(2, D).double(), nn.Linear(D, C).double()
    found = []
    for axis in (0, 1):
        model = Net(
            lambda net, x, axis=axis: net.b(torch.stack([*net.a(x).unbind(1)], axis)).flatten(0, 1),
            a=first,
            b=head,
        )
        lossfunc, target = extend(nn.CrossEntropyLoss()), y if axis else y.T
        loss = lossfunc(extend(model)(x), target.flatten())
        with backpack(KFLR()):
            loss.backward()
        found.append([*vars(head.weight)["kflr"], *vars(head.bias)["kflr"]])
    for moved, usual in zip(*found, strict=True):
        oracle.assert_close(moved, usual)


ORDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda h, order: h[order],
    "gather": lambda h, order: h.take_along_dim(order.unsqueeze(1), 0),
    "index_select": lambda h, order: h.index_select(0, order),
}


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, KFLR])
@pytest.mark.parametrize("name", ORDERS)
def test_a_layer_between_a_permutation_and_its_inverse(name: str, extension: Any) -> None:
    """Other orders in each pass: the first pass has the samples in order, and is measured."""
    pick, lossfunc = ORDERS[name], extend(nn.CrossEntropyLoss())
    model = extend(
        Net(
            lambda net, x, order: pick(net.b(pick(net.a(x), order).tanh()), order.argsort()).cos(),
            a=nn.Linear(2, D),
            b=nn.Linear(D, C),
        ).double()
    )
    for number in range(8):
        x, y = torch.randn(4, 2).double(), torch.randint(C, (4,))
        found = []
        for order in (torch.arange(4).roll(number), torch.arange(4)):
            with backpack(extension()):
                lossfunc(model(x, order), y).backward()
            found.append(getattr(model.b.weight, extension().savefield))
        for moved, usual in zip(*map(_all, found), strict=True):
            oracle.assert_close(moved, usual)


def _all(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [*result]
