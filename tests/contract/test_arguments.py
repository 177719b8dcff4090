"""Arguments by name, however they were passed: for rules of any package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import LayerRule, View
from backpack_core.testing import Arguments, RuleCase, check_case
from backpack_layers.arguments import arguments, by_slot, optional_tensor, tensor


class Gate(nn.Module):
    def forward(self, x: Tensor, scale: float = 2.0, *, gate: Tensor | None = None) -> Tensor:
        return scale * x if gate is None else scale * x * gate


class GateRule(LayerRule):
    module_types = (Gate,)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> tuple[Tensor | None, ...]:
        scale, gate = arguments(view)["scale"], optional_tensor(view, "gate")
        if gate is None:
            return by_slot(view, {"x": (scale * mat,)})
        own = {"gate": (scale * mat * tensor(view, "x"),), "x": (scale * mat * gate,)}
        return by_slot(view, own)


def inputs(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randn(n, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, gate: Arguments((x,)),
        lambda x, gate: Arguments((x, 3.0)),
        lambda x, gate: Arguments((x,), {"gate": gate}),
        lambda x, gate: Arguments((), {"gate": gate, "x": x, "scale": 0.5}),
    ],
    ids=["alone", "position", "keyword", "keywords"],
)
def test_however_they_were_passed(make: Any) -> None:
    case = RuleCase(Gate, lambda n: make(*inputs(n)), rule=GateRule)
    assert [result for result in check_case(case) if not result.ok] == []
