"""Modules that receive no tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backpack_core.testing import temporary_plugin
from backpack_products import ParametricRule
from tests.cases import Net, classification


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(4))

    def forward(self) -> Tensor:
        return torch.tanh(self.value)


class TokenRule(ParametricRule):
    module_types = (Token,)
    params = ("value",)

    def _jac_t_mat_prod(self, view: Any, mat: Tensor) -> tuple[Tensor, ...]:
        return ()

    def _param_jac_t_mat_prod(self, view: Any, name: str, mat: Tensor) -> Tensor:
        raise AssertionError("of what has no samples, a rule is not asked")


def test_a_module_that_receives_nothing() -> None:
    """Whatever a rule says, its parameters are read where operations use them."""
    with temporary_plugin(TokenRule):
        parts = {"a": nn.Linear(3, 4), "token": Token(), "c": nn.Linear(4, 3)}
        model = Net(lambda net, x: net.c(net.a(x) * net.token()), **parts)
        classification(model, (3,)).check()
