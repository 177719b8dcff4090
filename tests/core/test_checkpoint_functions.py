"""Functions inside checkpoints: autograd's saved tensors are given to us, and to autograd."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.contract.extension import Extension
from backpack_core.extensions import GGNMP, KFLR, BatchGrad, DiagGGNExact, DiagGGNMC, DiagHessian
from tests import oracle
from tests.cases import Problem, classification


class Attention(nn.Module):
    """A block of functions, with a gate, and random numbers in train mode."""

    runs = 0

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(4, 4), nn.Linear(4, 4)
        self.k = nn.Linear(4, 4, bias=False)  # a softmax does not see it
        self.dropout = dropout

    def forward(self, h: Tensor) -> Tensor:
        self.runs += 1
        weights = (self.q(h) @ self.k(h).transpose(1, 2)).softmax(-1)
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        return h + torch.sin(weights @ self.v(h)) * torch.sigmoid(self.v(h))


class Model(nn.Module):
    """Two blocks, each in a checkpoint or in none."""

    def __init__(self, is_checkpointed: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList([Attention(dropout), Attention(dropout)])
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.is_checkpointed else block(h)
        result: Tensor = self.last(h.mean(1))
        return result


def run(is_checkpointed: bool, dropout: float, *extensions: Extension) -> Problem:
    torch.manual_seed(0)
    problem = classification(Model(is_checkpointed, dropout), (6, 3), batch=4)
    torch.manual_seed(1)
    loss = problem.loss()
    torch.manual_seed(2)
    with backpack(*extensions, check="never"):
        loss.backward()
    return problem


EXTENSIONS: dict[str, Any] = {
    "grad_batch": BatchGrad,
    "diag_ggn_exact": DiagGGNExact,
    "diag_ggn_mc": DiagGGNMC,
    "kflr": KFLR,
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("field", EXTENSIONS)
def test_as_without_a_checkpoint(field: str, dropout: float) -> None:
    found = [run(mode, dropout, EXTENSIONS[field]()).fields(field) for mode in (True, False)]
    for ours, reference in zip(*found, strict=True):
        if field == "kflr":
            ours, reference = ours.dense(), reference.dense()
        oracle.assert_close(ours, reference)


def test_against_the_oracle() -> None:
    classification(Model(True), (6, 3), batch=4).check()


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"chunk_size": 2}])
def test_each_block_is_computed_once_more(options: dict[str, int]) -> None:
    """By whoever comes first, us or autograd, in whatever number of chunks."""
    problem = run(True, 0.0, DiagGGNExact(**options), BatchGrad(), KFLR())
    assert [block.runs for block in problem.model.blocks] == [2, 2]


def test_products() -> None:
    found = []
    for is_checkpointed in (True, False):
        problem = run(is_checkpointed, 0.0, GGNMP())
        products = problem.fields("ggnmp")
        pairs = zip(products, problem.parameters, strict=True)
        found.append([multiply(torch.ones_like(p)) for multiply, p in pairs])
    for ours, reference in zip(*found, strict=True):
        oracle.assert_close(ours, reference)


def test_two_passes_over_one_graph() -> None:
    problem = classification(Model(True), (6, 3), batch=4)
    loss = problem.loss()
    found = []
    for keep in (True, False):
        with backpack(DiagGGNExact(), retain_graph=keep):
            loss.backward(retain_graph=keep)
        found.append([value.clone() for value in problem.fields("diag_ggn_exact")])
    for first, second in zip(*found, strict=True):
        oracle.assert_close(first, second)


def test_what_a_checkpoint_gave_is_let_go_of() -> None:
    """Also what was asked for twice: nothing of a block lives when its gradient is computed."""
    alive: list[int] = []
    problem = classification(Model(True), (6, 3), batch=4)
    loss = problem.loss()
    sines: list[Any] = []

    def count(tensor: Tensor) -> Tensor:
        import weakref

        sines.append(weakref.ref(tensor))
        return tensor

    original = torch.sin
    try:
        torch.sin = lambda x: count(original(x))  # type: ignore[assignment]
        with backpack(DiagGGNExact()):
            loss.backward()
    finally:
        torch.sin = original
    alive = [1 for reference in sines if reference() is not None]
    assert len(sines) == 2
    assert alive == []


def test_a_plain_checkpoint_gives_once() -> None:
    """Nothing changes for those who ask outside of our passes."""
    x = torch.randn(3, requires_grad=True)
    extend(nn.Linear(3, 3))
    y = checkpoint(torch.sin, x, use_reentrant=False)
    assert y.grad_fn is not None
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, x.cos())


def test_hessian() -> None:
    """What a checkpoint computes again is differentiated twice."""
    found = [run(mode, 0.0, DiagHessian()).fields("diag_h") for mode in (True, False)]
    for ours, reference in zip(*found, strict=True):
        oracle.assert_close(ours, reference)


def test_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one thread asks for again is noted as given on others."""
    from backpack_interplay.checkpoints import _Holder, _Unpacked, unpacking_again

    monkeypatch.setattr(_Holder, "is_used", True)  # as where a checkpoint has run
    table = _Unpacked()
    table[0] = table[1] = object()
    output = torch.ones(1, requires_grad=True).exp()
    assert output.grad_fn is not None
    with unpacking_again(output.grad_fn):
        table[0] = None
        thread = threading.Thread(target=lambda: table.__setitem__(1, None))
        thread.start()
        thread.join()
    assert table[0] is not None
    assert table[1] is None
