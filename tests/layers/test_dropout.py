from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_core.contract.rules import LayerRule
from backpack_core.errors import OverwrittenInputError
from backpack_layers.dropout import SATURATION, AlphaDropoutRule, DropoutRule
from tests.layers.execution import check_rule, record

CASES: list[tuple[type[LayerRule], type[nn.Module], tuple[int, ...]]] = [
    (DropoutRule, nn.Dropout, (4,)),
    (DropoutRule, nn.Dropout, (4, 3, 2)),
    (DropoutRule, nn.Dropout1d, (4, 3)),
    (DropoutRule, nn.Dropout1d, (4,)),
    (DropoutRule, nn.Dropout2d, (4, 3, 2)),
    (DropoutRule, nn.Dropout3d, (4, 3, 2, 2)),
    (DropoutRule, nn.Dropout3d, (4, 3, 2)),
    (AlphaDropoutRule, nn.AlphaDropout, (4,)),
    (AlphaDropoutRule, nn.FeatureAlphaDropout, (4, 3, 2)),
]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(("rule", "kind", "shape"), CASES, ids=str)
def test_dropout(
    rule: type[LayerRule],
    kind: type[nn.Module],
    shape: tuple[int, ...],
    batch: int,
    p: float,
    mode: str,
) -> None:
    module = kind(p).train(mode == "train")
    check_rule(rule(), record(module, torch.randn(batch, *shape).double()))


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.FeatureAlphaDropout])
def test_a_channel_shows_its_mask_by_any_entry(kind: type[nn.Module]) -> None:
    x = torch.zeros(4, 3, 5).double()
    x[..., 2] = 1.0
    if kind is nn.Dropout2d:
        x = x.unsqueeze(-1)
    rule = AlphaDropoutRule() if kind is nn.FeatureAlphaDropout else DropoutRule()
    check_rule(rule, record(kind(0.5), x))


@pytest.mark.parametrize(
    ("rule", "module", "value"),
    [
        (DropoutRule, nn.Dropout(), 0.0),
        (DropoutRule, nn.Dropout1d(), 0.0),
        (AlphaDropoutRule, nn.AlphaDropout(), -SATURATION),
        (AlphaDropoutRule, nn.FeatureAlphaDropout(), -SATURATION),
    ],
    ids=str,
)
def test_hidden_masks(rule: type[LayerRule], module: nn.Module, value: float) -> None:
    x = torch.randn(3, 2, 4).double()
    x[1, 1] = value
    run = record(module, x)
    with torch.no_grad(), pytest.raises(OverwrittenInputError, match="random mask"):
        rule().jac_t_mat_prod(run.view, torch.ones(1, 3, 2, 4).double())


def test_in_place() -> None:
    run = record(nn.Dropout(inplace=True), torch.randn(3, 4).double())
    with pytest.raises(OverwrittenInputError):
        DropoutRule().jac_t_mat_prod(run.view, torch.ones(1, 3, 4).double())
    idle = nn.Dropout(inplace=True).eval()
    check_rule(DropoutRule(), record(idle, torch.randn(3, 4).double()))
