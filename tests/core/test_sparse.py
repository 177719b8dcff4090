"""Sparse tensors: an extended model takes them as before, and rules say that they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core import backpack, extend
from backpack_core.errors import BridgeError, SampleMixingError
from backpack_core.extensions import HMP, BatchGrad, DiagGGNExact
from tests.oracle import assert_close

LAYOUTS = pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")


class Neighbours(nn.Module):
    """A net over nodes: what each one receives is what a matrix of edges sends it."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        edges = self.edges if edges is None else edges
        return self.second(torch.relu(torch.sparse.mm(edges, self.first(x))))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, dtype=torch.double), torch.randint(3, (6,))


@LAYOUTS
def test_an_input_that_is_sparse(sparse: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, lossfunc, (x, y) = nn.Linear(4, 3).double(), nn.CrossEntropyLoss(), data()
    expected = torch.autograd.grad(lossfunc(model(sparse(x)), y), model.weight)[0]
    extend(model)
    lossfunc(model(sparse(x)), y).backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, expected)
    with pytest.raises(BridgeError, match=r"Linear .*sparse.*to_dense\(\)"), backpack(BatchGrad()):
        lossfunc(model(sparse(x)), y).backward()


@LAYOUTS
@pytest.mark.parametrize("is_given", [True, False])
def test_a_matrix_of_edges(sparse: Callable[[Tensor], Tensor], is_given: bool) -> None:
    torch.manual_seed(0)
    x, y = data()
    alone = sparse(torch.eye(6, dtype=torch.double))
    model, lossfunc = extend(Neighbours(alone)), extend(nn.CrossEntropyLoss())
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(model(x, alone if is_given else None), y).backward()
    dense = extend(nn.Sequential(model.first, nn.ReLU(), model.second))
    found = model.first.weight.grad_batch, model.first.weight.diag_ggn_exact
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(dense(x), y).backward()
    assert_close(found[0], model.first.weight.grad_batch)
    assert_close(found[1], model.first.weight.diag_ggn_exact)


@LAYOUTS
def test_a_checkpoint_of_edges(sparse: Callable[[Tensor], Tensor]) -> None:
    """It is computed again between chunks, as long as what it holds is small."""
    torch.manual_seed(0)
    (x, y), alone = data(), sparse(torch.eye(6, dtype=torch.double))
    model, lossfunc = extend(Neighbours(alone)), extend(nn.CrossEntropyLoss())
    with backpack(DiagGGNExact()):
        lossfunc(model(x), y).backward()
    wanted = model.first.weight.diag_ggn_exact
    with backpack(DiagGGNExact(chunk_size=1)):
        lossfunc(checkpoint(model, x, use_reentrant=False), y).backward()
    assert_close(model.first.weight.diag_ggn_exact, wanted)


def test_edges_between_samples() -> None:
    torch.manual_seed(0)
    x, y = data()
    edges = torch.rand(6, 6, dtype=torch.double).to_sparse()
    model, lossfunc = extend(Neighbours(edges)), extend(nn.CrossEntropyLoss())
    with pytest.raises(SampleMixingError, match="SparseAddmm"), backpack(BatchGrad()):
        lossfunc(model(x), y).backward()
    with backpack(HMP()):
        lossfunc(model(x), y).backward()
    assert model.first.weight.hmp(torch.ones(5, 4, dtype=torch.double)).shape == (5, 4)
