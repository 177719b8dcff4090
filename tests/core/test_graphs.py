"""Batches of graphs: nodes of all of them on one axis, edges by index, and an output for each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, errors, extend
from backpack_core.extensions import BatchGrad
from tests.oracle import assert_close


class GraphNet(nn.Module):
    """Two convolutions, and the sum over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, sizes: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            h = layer(x)
            x = torch.relu(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))
        return self.last(x.new_zeros(len(sizes), 6).index_add(0, graph, x))


def _batch(counts: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    begin = [sum(counts[:i]) for i in range(len(counts))]
    edges = [torch.randint(n, (2, 6)) + b for n, b in zip(counts, begin, strict=True)]
    sizes = torch.tensor(counts)
    graph = torch.arange(len(counts)).repeat_interleave(sizes)
    return torch.randn(sum(counts), 4), torch.cat(edges, 1), graph, sizes


COUNTS = [[3, 5, 2], [3, 5, 2, 4], [4, 4, 4, 4], [2, 3], [1, 1, 1, 1]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_graphs_are_the_samples(counts: list[int]) -> None:
    batch, y = _batch(counts), torch.randint(3, (len(counts),))
    model, lossfunc = extend(GraphNet()), extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack(BatchGrad()):
        lossfunc(model(*batch), y).backward()
    x, edges, graph, sizes = batch
    for n, begin in enumerate([0, *sizes.cumsum(0)[:-1].tolist()]):
        own, nodes = edges[:, graph[edges[0]] == n] - begin, graph == n
        output = model(x[nodes], own, graph[nodes] - n, sizes[n : n + 1])
        expected = torch.autograd.grad(F.cross_entropy(output, y[n : n + 1]), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert_close(parameter.grad_batch[n], gradient)  # type: ignore[attr-defined]


class WithoutSizes(GraphNet):
    """Is told how many graphs there are by no tensor."""

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edges, graph, graph.new_zeros(int(graph.max()) + 1))


@pytest.mark.parametrize("counts", COUNTS[:3], ids=str)
@pytest.mark.parametrize("is_module", [True, False])
def test_edges_are_no_batch_of_two(counts: list[int], is_module: bool) -> None:
    """As many graphs as a multiple of the two rows of the edges: those are not the samples."""
    batch, y = _batch(counts)[:3], torch.randint(3, (len(counts),))
    model, lossfunc = extend(WithoutSizes()), nn.CrossEntropyLoss()
    if is_module:
        extend(lossfunc)
    loss = lossfunc(model(*batch), y)
    with (
        pytest.raises(errors.ShapeError, match="one tensor with an entry for each"),
        backpack(BatchGrad()),
    ):
        loss.backward()
