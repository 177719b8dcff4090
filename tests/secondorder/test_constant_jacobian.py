"""Rules that declare one input Jacobian for all samples have one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_products.derivatives import second_order
from backpack_products.some_samples import subsample
from tests.layer_cases import LAYERS, LayerCase
from tests.layers.execution import record
from tests.oracle import assert_close

MORE = [
    LayerCase(lambda: nn.BatchNorm1d(3), (3,)),
    LayerCase(lambda: nn.Upsample(scale_factor=2), (2, 3)),
    LayerCase(lambda: nn.ReflectionPad1d(1), (2, 3)),
    LayerCase(lambda: nn.ZeroPad2d(1), (2, 3, 3)),
    LayerCase(lambda: nn.PixelShuffle(2), (4, 2, 2)),
    LayerCase(lambda: nn.ChannelShuffle(2), (4, 3)),
    LayerCase(lambda: nn.Unfold(2), (1, 3, 3)),
]


def declared() -> list[LayerCase]:
    ensure_loaded()
    cases = [*LAYERS, *MORE]
    return [c for c in cases if second_order(registry.resolve(c.make()).rule).jacobian_is_constant]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", declared(), ids=lambda case: case.id)
def test_one_jacobian(case: LayerCase) -> None:
    layer = case.make().eval()
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0)
    view = record(layer, torch.randn(3, *case.shape)).view
    ensure_loaded()  # another test may have unloaded the plugins
    rule = registry.resolve(layer).rule
    columns = torch.randn(2, 1, *view.output_shape[1:])
    product = rule.jac_t_mat_prod(view, columns.expand(-1, *view.output_shape))[0]
    assert product is not None
    alone = rule.jac_t_mat_prod(subsample(view, [0]), columns)[0]
    assert alone is not None
    assert_close(product, alone.expand(-1, 3, *alone.shape[2:]))
    assert second_order(rule).hessian_is_zero or isinstance(layer, nn.Bilinear)


def test_it_is_declared() -> None:
    names = {type(case.make()).__name__ for case in declared()}
    assert {"Linear", "Conv2d", "ConvTranspose3d", "AvgPool1d", "Flatten", "BatchNorm1d"} <= names
    assert not names & {"ReLU", "Tanh", "Dropout", "MaxPool2d"}
