"""Nested tensors: refused with the place and the way out, and left alone where nothing is asked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import HMP, BatchGrad, DiagGGNExact
from tests.cases import Net

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

LAYOUTS = [torch.strided, torch.jagged]


def samples(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)


def padded(x: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(x, 0.0)  # type: ignore[no-any-return]


def net(where: str, layout: torch.layout) -> tuple[Net, Tensor]:
    """Linear layers before, behind or around nested tensors, and an input."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.a(x)
        if where == "between":
            rows = [torch.tanh(row) for row in hidden.unbind()]
            return net.b(padded(2 * torch.nested.as_nested_tensor(rows, layout=layout)))  # type: ignore[no-any-return]
        return padded(net.b(torch.relu(hidden)))

    model = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    return model, torch.randn(2, 4, 3) if where == "between" else samples(layout)


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, HMP])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["around", "between"])
def test_a_nested_tensor_is_refused(where: str, layout: torch.layout, extension: Any) -> None:
    model, x = net(where, layout)
    extend(model)
    place = {
        "around": "Linear 'b' received or returned is a nested tensor",
        "between": "(?s)operation 'Mul' made is a nested tensor.*after Linear 'a'",
    }
    with pytest.raises(UnsupportedError, match=place[where]), backpack(extension()):
        extend(nn.MSELoss())(output := model(x), torch.zeros_like(output)).backward()


@pytest.mark.host("torch warns of its slow kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_without_a_block(layout: torch.layout) -> None:
    model, x = net("around", layout)
    plain = copy.deepcopy(model)
    for one in (extend(model), plain):
        one(x).square().sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)  # type: ignore[arg-type]
