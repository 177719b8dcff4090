from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchGrad
from backpack_layers.shape import (
    ChannelShuffleRule,
    PixelShuffleRule,
    ReshapeRule,
    UnfoldRule,
    UpsampleRule,
)
from tests.layers.execution import check_rule, record

CASES: list[tuple[type[LayerRule], nn.Module, tuple[int, ...]]] = [
    (ReshapeRule, nn.Flatten(), (2, 3)),
    (ReshapeRule, nn.Flatten(), (4,)),
    (ReshapeRule, nn.Flatten(2, -1), (2, 3, 2)),
    (ReshapeRule, nn.Flatten(-3, -2), (2, 3, 2)),
    (ReshapeRule, nn.Unflatten(1, (2, 2)), (4, 3)),
    (ReshapeRule, nn.Identity(), (2, 3)),
    (PixelShuffleRule, nn.PixelShuffle(2), (8, 3, 2)),
    (PixelShuffleRule, nn.PixelUnshuffle(2), (2, 6, 4)),
    (ChannelShuffleRule, nn.ChannelShuffle(2), (6, 2, 3)),
    (ChannelShuffleRule, nn.ChannelShuffle(3), (6, 4)),
    (UnfoldRule, nn.Unfold(2), (2, 4, 5)),
    (UnfoldRule, nn.Unfold((3, 2), dilation=(1, 2), padding=1, stride=(2, 1)), (2, 4, 5)),
    (UnfoldRule, nn.Fold((4, 5), (2, 3), padding=1, stride=2), (12, 9)),
    (UpsampleRule, nn.Upsample(scale_factor=2), (2, 3)),
    (UpsampleRule, nn.Upsample(scale_factor=1.7, recompute_scale_factor=True), (2, 3, 4)),
    (UpsampleRule, nn.Upsample((7, 5)), (2, 3, 4)),
    (UpsampleRule, nn.Upsample(scale_factor=(2, 1, 3)), (2, 2, 3, 2)),
    (UpsampleRule, nn.Upsample(7, mode="linear"), (2, 3)),
    (UpsampleRule, nn.Upsample(scale_factor=2.5, mode="bilinear"), (2, 3, 4)),
    (UpsampleRule, nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True), (2, 3, 4)),
    (UpsampleRule, nn.Upsample(scale_factor=2, mode="trilinear"), (2, 2, 3, 2)),
    (UpsampleRule, nn.Upsample(scale_factor=2, mode="nearest-exact"), (2, 3, 4)),
    (UpsampleRule, nn.UpsamplingNearest2d(scale_factor=2), (2, 3, 4)),
    (UpsampleRule, nn.UpsamplingBilinear2d(size=(5, 6)), (2, 3, 4)),
]
REFUSED: list[tuple[type[LayerRule], nn.Module, tuple[int, ...]]] = [
    (PixelShuffleRule, nn.PixelShuffle(2), (4, 3, 3)),
    (UnfoldRule, nn.Unfold(2), (2, 4, 4)),
    (UnfoldRule, nn.Fold((2, 2), 1), (2, 4)),
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("rule", "module", "shape"), CASES, ids=str)
def test_shape(
    rule: type[LayerRule], module: nn.Module, shape: tuple[int, ...], batch: int
) -> None:
    check_rule(rule(), record(module, torch.randn(batch, *shape).double()))


@pytest.mark.parametrize(("rule", "module", "shape"), REFUSED, ids=str)
def test_refusals(rule: type[LayerRule], module: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match="batch axis"):
        rule().check(record(module, torch.randn(shape)).view)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Flatten(0, 1), (2, 3, 4)),
        (nn.Flatten(-3, -2), (2, 3, 4)),
        (nn.Unflatten(0, (-1, 3)), (6, 4)),
        (nn.Unflatten(0, (2, 3)), (6, 4)),
    ],
    ids=str,
)
def test_rows_that_change_in_number_go_by_the_operation(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    """As if the function had been called: the samples are those of what the model received."""
    x, linear, found = torch.randn(2, 3, 4), nn.Linear(4, 5), []
    rows = [nn.Flatten(0, 1)] if len(shape) == 2 else []
    for middle in (module, Functional(module)):
        net = extend(nn.Sequential(nn.Linear(4, 4), *rows, middle, linear))
        torch.manual_seed(0)
        with torch.no_grad():
            net[0].weight.copy_(torch.randn(4, 4))
            net[0].bias.zero_()
        with backpack(BatchGrad()):
            net(x).square().sum().backward()
        found.append([vars(p)["grad_batch"] for p in net.parameters()])
        assert all(len(g) == 2 for g in found[-1])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


class Functional(nn.Module):
    """The function of a module of torch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.apply_it = [module]

    def forward(self, x: Tensor) -> Tensor:
        module = self.apply_it[0]
        if isinstance(module, nn.Flatten):
            return x.flatten(module.start_dim, module.end_dim)
        assert isinstance(module, nn.Unflatten)
        return x.unflatten(module.dim, module.unflattened_size)  # type: ignore[arg-type]
