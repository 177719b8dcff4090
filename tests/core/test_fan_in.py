"""Where nothing is sent because nobody reads: found out once for every node."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact
from backpack_operations import crossings
from tests.cases import Net


def test_what_many_operations_end_in_is_not_searched_again(monkeypatch: Any) -> None:
    searched: Counter[Any] = Counter()
    children_of = crossings.children_of

    def counted(node: Any) -> Any:
        searched[node] += 1
        return children_of(node)

    monkeypatch.setattr(crossings, "children_of", counted)
    net = Net(
        lambda net, x: net.a(x.detach()) + torch.stack([x * i for i in range(50)]).sum(0),
        a=nn.Linear(3, 3),
    )
    x = torch.randn(4, 3, requires_grad=True)
    loss = extend(nn.CrossEntropyLoss())(extend(net)(x), torch.arange(4) % 3)
    with backpack(DiagGGNExact(), check="never"):
        loss.backward()
    assert len(searched) > 50
    assert max(searched.values()) == 2


@pytest.mark.parametrize("count", [5000])
def test_a_long_way_is_no_recursion(count: int) -> None:
    def forward(net: Any, x: Any) -> Any:
        for _ in range(count):
            x = x + 0
        return net.a(x)

    x = torch.randn(2, 3, requires_grad=True)
    net = extend(Net(lambda net, x: forward(net, net.b(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 3)))
    loss = extend(nn.CrossEntropyLoss())(net(x), torch.arange(2))
    with backpack(DiagGGNExact(), check="never"):
        loss.backward()
    assert net.b.weight.diag_ggn_exact.any()
