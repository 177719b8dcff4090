"""Results with a row for each column, of columns that arrive in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from backpack_core import backpack, extend
from backpack_core.extensions import Jacobians, SqrtGGNExact
from tests import oracle

OUTPUTS = 24
# Operations that copy entries into memory that is theirs.
COPIES = {"aten.cat.default", "aten.copy_.default", "aten.clone.default"}


class Copied(TorchDispatchMode):
    """Counts entries that are copied into results with an axis for columns, and one for samples."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) in COPIES and result.dim() > 3:
            self.entries += result.numel()
        return result


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, OUTPUTS))


@pytest.mark.parametrize("kind", [Jacobians, SqrtGGNExact])
def test_rows_are_copied_once(kind: Any) -> None:
    """Whatever the number of chunks."""
    torch.manual_seed(0)
    net, lossfunc, x = extend(_net()), extend(nn.MSELoss()), torch.randn(2, 3)
    results = {}
    for size in (None, 1, 5):
        loss = lossfunc(net(x), torch.zeros(2, OUTPUTS))
        with backpack(kind(chunk_size=size), check="never"), Copied() as copied:
            loss.backward()
        found = [getattr(p, kind.savefield) for p in net.parameters()]
        results[size] = found
        weights = sum(value.numel() for value in found if value.dim() > 3)
        assert copied.entries <= 2 * weights
    for size in (1, 5):
        for ours, whole in zip(results[size], results[None], strict=True):
            oracle.assert_close(ours, whole)
            assert ours.stride() == whole.stride()


@pytest.mark.parametrize("size", [None, 1, 2, 3])
def test_rows_of_several_losses(size: int | None) -> None:
    """The first layer is reached by the columns of both losses, a head by those of one."""
    torch.manual_seed(0)
    below, heads = nn.Linear(3, 4), [nn.Linear(4, 3), nn.Linear(4, 5)]
    net = extend(nn.ModuleList([below, nn.Tanh(), *heads]))
    lossfuncs = [extend(nn.MSELoss()), extend(nn.CrossEntropyLoss())]
    targets = [torch.zeros(2, 3), torch.tensor([1, 4])]
    hidden = net[1](below(torch.randn(2, 3)))
    terms = [*zip([head(hidden) for head in heads], lossfuncs, targets, strict=True)]
    losses = [lossfunc(output, target) for output, lossfunc, target in terms]
    with backpack(SqrtGGNExact(chunk_size=size)):
        (losses[0] + losses[1]).backward(retain_graph=True)
    for p in net.parameters():
        root: Any = p
        oracle.assert_close(_outer(root.sqrt_ggn_exact), _sum(_block(*term, p) for term in terms))


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([*parts]).sum(0)


def _outer(root: Tensor) -> Tensor:
    flat = root.flatten(2).flatten(0, 1)
    return flat.T @ flat


def _block(output: Tensor, lossfunc: nn.Module, target: Tensor, parameter: Tensor) -> Tensor:
    """The block of the generalised Gauss-Newton matrix."""
    hessian = torch.autograd.functional.hessian(lambda z: lossfunc(z, target), output.detach())
    rows = [
        torch.autograd.grad(entry, parameter, retain_graph=True, allow_unused=True)[0]
        for entry in output.flatten()
    ]
    jacobian = torch.stack([torch.zeros_like(parameter) if r is None else r for r in rows])
    flat = jacobian.flatten(1)
    size = output.numel()
    return flat.T @ hessian.reshape(size, size) @ flat  # type: ignore[no-any-return]


def test_rows_under_autocast() -> None:
    """Columns in half precision, and results in that of the parameter."""
    net, lossfunc = extend(_net().float()), extend(nn.MSELoss())
    x, target = torch.randn(2, 3, dtype=torch.float32), torch.zeros(2, OUTPUTS)
    found = {}
    for size in (None, 5):
        with torch.autocast("cpu", torch.bfloat16):
            loss = lossfunc(net(x), target.float())
        with backpack(Jacobians(chunk_size=size)):
            loss.backward()
        found[size] = [p.jacobians for p in net.parameters()]  # type: ignore[attr-defined]
    for ours, whole in zip(found[5], found[None], strict=True):
        assert ours.dtype is torch.float32
        assert ours.equal(whole)
