"""Kronecker factors of layers whose rows are no samples: nodes of graphs, tokens, hypernetworks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import KFLR
from tests.cases import Net
from tests.oracle import assert_close

SHARES = [[3, 4, 3, 4], [2, 4, 4, 2], [1, 1, 5, 1]]


def factors(model: nn.Module, lossfunc: nn.Module, *inputs: Tensor, **options: Any) -> list[Tensor]:
    """The factors of the weight of ``model.layer``."""
    with backpack(KFLR(**options)):
        loss: Tensor = lossfunc(model(*inputs), torch.zeros(4, 2))
        loss.backward()
    layer: Any = model.layer
    return list(layer.weight.kflr)


def graphs(net: Net, x: Tensor, graph: Tensor) -> Tensor:
    """Nodes of graphs. Those whose first feature is negative send nothing."""
    sent = net.layer(x) * (x[:, :1] > 0)
    return torch.zeros(4, 2).index_add(0, graph, sent)


@pytest.mark.parametrize("sharing", ["kfc", "expand"])
def test_rows_that_reach_no_loss_count_once(sharing: str) -> None:
    """One model for several batches: a factor does not depend on those before."""
    model, lossfunc = (
        extend(Net(graphs, layer=nn.Linear(3, 2))),
        extend(nn.MSELoss(reduction="sum")),
    )
    for share in SHARES * 2:
        graph = torch.arange(4).repeat_interleave(torch.tensor(share))
        x = torch.randn(len(graph), 3)
        x[:, 0] = x[:, 0].abs()
        x[1::3, 0] *= -1
        outer, inner = factors(model, lossfunc, x, graph, weight_sharing=sharing)
        assert_close(inner, x.T @ x / (len(x) if sharing == "expand" else 4))
        used = (x[:, 0] > 0).double()
        count = used if sharing == "expand" else torch.zeros(4).index_add(0, graph, used).square()
        assert_close(outer, 2 * count.sum() * torch.eye(2))


@pytest.mark.parametrize("kind", ["trained", "frozen", "buffer"])
def test_rows_of_a_hypernetwork_belong_to_every_sample(kind: str) -> None:
    """Even if they reach the loss of one sample only, or of none."""

    def made(net: Net, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, net.last(torch.tanh(net.layer(net.z))).view(2, 3)))

    model = Net(made, layer=nn.Linear(2, 3), last=nn.Linear(3, 6))
    z = torch.rand(1, 2)
    if kind == "buffer":
        model.register_buffer("z", z)
    else:
        model.z = nn.Parameter(z.clone(), requires_grad=kind == "trained")
    with torch.no_grad():
        for p in model.parameters():
            p.abs_()
    extend(model)
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    for alive in ([2], [0, 1, 2, 3], [1, 3], [0], []):
        x = -torch.rand(4, 3)
        x[alive] *= -1
        _, inner = factors(model, lossfunc, x)
        assert_close(inner, z.T @ z)


def _queries(net: Net, x: Tensor) -> Tensor:
    rows: Tensor = net.table.expand(len(x), -1, -1)
    return net.layer((rows @ x.mT).softmax(2) @ x).sum(1)  # type: ignore[no-any-return]


def _tokens(net: Net, x: Tensor) -> Tensor:
    rows = torch.cat([net.table.expand(len(x), -1, -1), x], 1)
    return net.layer(rows).sin().sum(1)  # type: ignore[no-any-return]


def _gates(net: Net, x: Tensor) -> Tensor:
    return net.layer(net.table.expand(len(x), -1, -1) * x).sin().sum(1)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("forward", [_queries, _tokens, _gates])
def test_a_table_that_is_expanded_for_a_batch_of_one_sample(forward: Any) -> None:
    """Its factors are those of a batch of two equal samples, if the loss is a mean."""
    net = Net(forward, table=nn.Parameter(torch.randn(1, 3, 4)), layer=nn.Linear(4, 2))
    model, lossfunc = extend(net), extend(nn.MSELoss())
    x, found = torch.randn(1, 3, 4), []
    for batch in (x, x.repeat(2, 1, 1)):
        with backpack(KFLR()):
            lossfunc(model(batch), torch.zeros(len(batch), 2)).backward()
        found.append([*model.table.kflr])  # type: ignore[union-attr]
    for one, two in zip(*found, strict=True):
        assert_close(one, two)
