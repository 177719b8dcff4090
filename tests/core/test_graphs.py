"""Batches of graphs: nodes of all of them on one axis, edges by index, and an output for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, errors, extend
from backpack_core.extensions import BatchDiagGGNExact, BatchGrad, DiagGGNExact
from backpack_core.testing import oracle as kit
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


def _add(h: Tensor, graph: Tensor, count: int) -> Tensor:
    return h.new_zeros(count, h.shape[1]).index_add(0, graph, h)


def _scatter(h: Tensor, graph: Tensor, count: int) -> Tensor:
    return h.new_zeros(count, h.shape[1]).scatter_add_(0, graph[:, None].expand_as(h), h)


def _mean(h: Tensor, graph: Tensor, count: int) -> Tensor:
    return h.new_zeros(count, h.shape[1]).index_reduce(0, graph, h, "mean", include_self=False)


def _largest(h: Tensor, graph: Tensor, count: int) -> Tensor:
    index = graph[:, None].expand_as(h)
    return h.new_zeros(count, h.shape[1]).scatter_reduce(0, index, h, "amax", include_self=False)


def _multiply(h: Tensor, graph: Tensor, count: int) -> Tensor:
    return F.one_hot(graph, count).to(h.dtype).T @ h


class Pooled(nn.Module):
    """Is told how many graphs there are by no tensor, and has a head, or none."""

    def __init__(self, pool: Callable[[Tensor, Tensor, int], Tensor], has_head: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.last = nn.Linear(3, 3) if has_head else nn.Identity()
        self.pool = pool

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.second(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))
        return self.last(self.pool(h, graph, int(graph.max()) + 1))


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("counts", [[2, 3, 1], [2, 4], [3]], ids=str)
@pytest.mark.parametrize("pool", [_add, _scatter, _mean, _largest])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("is_module", [True, False])
def test_rows_that_are_added_up_are_no_samples(
    counts: list[int], pool: Any, has_head: bool, is_module: bool
) -> None:
    torch.manual_seed(0)
    batch, y = _batch(counts)[:3], torch.randint(3, (len(counts),))
    model, lossfunc = Pooled(pool, has_head), nn.CrossEntropyLoss(reduction="sum")
    output, parameters = model(*batch), [*model.parameters()]
    gradients = kit.jacobians(F.cross_entropy(output, y, reduction="none"), _by_number(parameters))
    jacobians = kit.jacobians(output, _by_number(parameters))
    p = output.detach().softmax(1)
    hessian = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    extend(model)
    extensions: list[Any] = [BatchGrad()]
    if is_module:
        extend(lossfunc)
        extensions += [BatchDiagGGNExact(), DiagGGNExact(subsampling=[-1])]
    with backpack(*extensions):
        lossfunc(model(*batch), y).backward()
    for k, parameter in enumerate(parameters):
        assert_close(parameter.grad_batch, gradients[k])  # type: ignore[attr-defined]
        if is_module:
            diagonal = torch.einsum("nc...,ncd,nd...->n...", jacobians[k], hessian, jacobians[k])
            assert_close(parameter.diag_ggn_exact_batch, diagonal)  # type: ignore[attr-defined]
            assert_close(parameter.diag_ggn_exact, diagonal[-1])  # type: ignore[attr-defined]


def _by_number(parameters: list[nn.Parameter]) -> dict[int, Tensor]:
    return dict(enumerate(parameters))


@pytest.mark.parametrize("is_module", [True, False])
def test_samples_that_a_loss_compares_with_their_sums_mix(is_module: bool) -> None:
    """Centres of classes are no samples, where the loss has a term for each sample."""
    model, x, y = extend(nn.Linear(3, 2)), torch.randn(6, 3), torch.tensor([0, 1, 2, 1, 0, 0])
    lossfunc = extend(nn.MSELoss()) if is_module else F.mse_loss
    h = model(x)
    loss = lossfunc(h, _add(h, y, 3)[y])
    with pytest.raises(errors.SampleMixingError), backpack(BatchGrad()):
        loss.backward()


@pytest.mark.parametrize("is_module", [True, False])
def test_a_matrix_does_not_say_which_rows_belong_together(is_module: bool) -> None:
    batch, y = _batch(COUNTS[0])[:3], torch.randint(3, (3,))
    model, lossfunc = extend(Pooled(_multiply, True)), nn.CrossEntropyLoss()
    if is_module:
        extend(lossfunc)
    loss = lossfunc(model(*batch), y)
    with (
        pytest.raises(errors.ShapeError, match="one more tensor with an entry for each"),
        backpack(BatchGrad()),
    ):
        loss.backward()
