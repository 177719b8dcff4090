"""A parameter that another one meets, and that is updated as soon as its gradient is there.

Products in factors wait for further uses, or for autograd to get to a parameter. What they were
made of must be that of the forward pass by then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.extensions import BatchDiagGGNExact, BatchGrad, ClippedSumGrad, SqrtGGNExact
from tests import oracle
from tests.cases import Net

D = 3


def _parameters(*shapes: tuple[int, ...]) -> nn.ParameterList:
    return nn.ParameterList(torch.randn(shape) for shape in shapes)


def _with_image(net: Any, x: Tensor) -> Tensor:
    """A layer sees data, and an image that is trained and added to them."""
    seen = net.layer(x[:, None]) * net.layer(net.image).tanh()
    return seen.flatten(1)


# Modules, what they compute of data [N, 3], and whether a layer is called twice.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "a layer reads a table": lambda: Net(
        lambda m, x: x * m.layer(m.more[0]).tanh().sum(0),
        layer=nn.Linear(D, D),
        more=_parameters((4, D)),
    ),
    "a layer reads data as well": lambda: Net(
        lambda m, x: m.layer(x * m.layer(m.more[0]).tanh().sum(0)),
        layer=nn.Linear(D, D),
        more=_parameters((4, D)),
    ),
    "a weight of three": lambda: Net(
        lambda m, x: F.linear(x, m.more[0] @ m.more[1] @ m.more[2] + m.more[0]),
        layer=nn.Linear(1, 1),
        more=_parameters((D, D), (D, D), (D, D)),
    ),
    "a layer reads an image": lambda: Net(
        _with_image, layer=nn.Conv1d(1, 2, 2), image=nn.Parameter(torch.randn(1, 1, D))
    ),
}


def _found(model: nn.Module, x: Tensor, updates: bool) -> dict[str, Tensor]:
    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(1.0)

    for parameter in model.parameters() if updates else ():
        parameter.register_post_accumulate_grad_hook(update)
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    out = extend(model)(x)
    extensions = BatchGrad(), ClippedSumGrad(max_norm=0.3), BatchDiagGGNExact(), SqrtGGNExact()
    with backpack(*extensions):
        lossfunc(out, torch.ones_like(out)).backward()
    return {
        f"{extension.savefield} of {name}": getattr(parameter, extension.savefield)
        for name, parameter in model.named_parameters()
        for extension in extensions
        if parameter.grad is not None
    }


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_forward_pass(name: str) -> None:
    model, x = MODELS[name](), torch.randn(4, D)
    expected = _found(copy.deepcopy(model), x, updates=False)
    found = _found(model, x, updates=True)
    assert found.keys() == expected.keys()
    for field, value in expected.items():
        oracle.assert_close(found[field], value)
