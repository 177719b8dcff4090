"""Heads of some samples' rows only, and of rows that are picked once more behind the head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import SampleMixingError, ShapeError
from backpack_core.extensions import BatchDiagGGNExact, BatchGrad, BatchL2Grad
from tests.cases import Net

N, C = 4, 3
Pick = Callable[[Tensor], Tensor]

SOME: dict[str, Pick] = {
    "one": lambda h: h[1:2],
    "last ones": lambda h: h[1:],
    "every other one": lambda h: h[::2],
    "part": lambda h: h.split([1, 3])[1],
    "entries of one": lambda h: h[-1],
    "slice of merged": lambda h: h.flatten(0, 1)[2:9],
}
RAGGED = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 1, 1], [1, 0, 1]]).bool()  # twice as many as N
AGAIN: dict[str, Pick] = {
    "mask": lambda z: z[torch.arange(len(z)) != 2],
    "index": lambda z: z[torch.tensor([4, 2, 3])],
    "another order": lambda z: z[torch.arange(len(z)).flip(0)],
    "repeated": lambda z: z[[4, 2, 3, 1, 0, 0, 4, 5]],
}


def _net(pick: Pick) -> nn.Module:
    layers = {"a": nn.Linear(2, 5), "b": nn.Linear(5, C)}
    return Net(lambda net, x: net.b(torch.tanh(pick(net.a(x)))), **layers).double()


def _owners(pick: Pick, inputs: Tensor) -> Tensor:
    every = torch.arange(1.0 * N).view(N, *[1] * (inputs.dim() - 1))
    return pick(every.expand(*inputs.shape[:-1], 1))[..., 0]


def _inputs(positions: int) -> Tensor:
    return torch.randn(N, *([positions] if positions else []), 2).double()


@pytest.mark.parametrize(("name", "positions"), [
    *((name, 0) for name in ("one", "last ones", "every other one", "part")),
    *((name, positions) for name in ("entries of one", "slice of merged") for positions in (3, 5)),
])  # fmt: skip
def test_heads_of_some_samples(name: str, positions: int) -> None:
    pick, inputs = SOME[name], _inputs(positions)
    net = _net(pick)
    parameters, owners, out = list(net.parameters()), _owners(pick, inputs), net(inputs)
    expected = [
        torch.autograd.grad(out[owners == n].exp().sum(), parameters, retain_graph=True)
        for n in range(N)
    ]
    extend(net)
    for subsampling in (None, [2, 0]):
        with backpack(BatchGrad(subsampling=subsampling), BatchL2Grad(subsampling=subsampling)):
            net(inputs).exp().sum().backward()
        for k, p in enumerate(parameters):
            every = torch.stack([gradient[k] for gradient in expected])[subsampling or slice(None)]
            torch.testing.assert_close(p.grad_batch, every)  # type: ignore[attr-defined]
            squares = every.flatten(1).square().sum(1)
            torch.testing.assert_close(p.batch_l2, squares)  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [Tensor.sum, lambda out: out.square().sum()])
def test_heads_of_what_has_no_samples(loss: Pick) -> None:
    net = extend(_net(lambda h: h.mean(0, keepdim=True)))
    with pytest.raises(ShapeError, match="received 1 entries"), backpack(BatchGrad()):
        loss(net(_inputs(0))).backward()


@pytest.mark.parametrize(("is_extended", "positions"), [(True, 3), (False, 3), (False, N)])
@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("rows", [6, 8])
def test_rows_picked_twice(again: str, is_extended: bool, positions: int, rows: int) -> None:
    mask = RAGGED.clone()
    mask[0, :2] = rows == 8
    mask = torch.cat([mask, torch.zeros(N, positions - 3, dtype=torch.bool)], 1)
    inputs, net = _inputs(positions), _net(lambda h: h[mask])
    out = AGAIN[again](net(inputs))
    owners = AGAIN[again](_owners(lambda h: h[mask], inputs)).long()
    target = torch.arange(len(out)) % C
    parameters = list(net.parameters())
    gradients = [torch.zeros(N, *p.shape).double() for p in parameters]
    diagonals = [torch.zeros(N, *p.shape).double() for p in parameters]
    for owner, row, label in zip(owners, out, target, strict=True):
        jacobian = [torch.autograd.grad(z, parameters, retain_graph=True) for z in row]
        p = row.softmax(0).detach()
        hessian = (p.diag() - p.outer(p)) / len(out)
        slope = (p - nn.functional.one_hot(label, C)) / len(out)
        for k, columns in enumerate(map(torch.stack, zip(*jacobian, strict=True))):
            gradients[k][owner] += torch.einsum("i,i...->...", slope, columns)
            diagonals[k][owner] += torch.einsum("i...,ij,j...->...", columns, hessian, columns)
    extend(net)
    lossfunc = extend(nn.CrossEntropyLoss()) if is_extended else nn.functional.cross_entropy
    extensions = [BatchGrad(), *([BatchDiagGGNExact()] if is_extended else [])]
    with backpack(*extensions, check="always"):
        lossfunc(AGAIN[again](net(inputs)), target).backward()
    for p, gradient, diagonal in zip(parameters, gradients, diagonals, strict=True):
        torch.testing.assert_close(p.grad_batch, gradient)  # type: ignore[attr-defined]
        if is_extended:
            torch.testing.assert_close(p.diag_ggn_exact_batch, diagonal)  # type: ignore[attr-defined]


@pytest.mark.parametrize("again", AGAIN)
def test_rows_picked_twice_that_meet(again: str) -> None:
    net = extend(_net(lambda h: h[RAGGED]))
    z = AGAIN[again](net(_inputs(3)))
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        (z * z.roll(1, 0)).exp().sum().backward()


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_go_with_the_scale_of_the_loss(scale: float, dtype: torch.dtype) -> None:
    """The number that ``backward()`` starts from, one, says nothing of the size of gradients."""
    net, inputs = extend(_net(lambda h: h)).to(dtype), _inputs(0).to(dtype)
    with backpack(BatchGrad()):
        (net(inputs).square().sum() * scale).backward()
    z = net(inputs)
    with pytest.raises(SampleMixingError), backpack(BatchGrad()):
        ((z * z.roll(1, 0)).square().sum() * scale).backward()
