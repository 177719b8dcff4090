from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backpack_core import backpack, extend
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import OverwrittenInputError, UnsupportedError
from backpack_core.extensions import DiagGGNExact
from backpack_layers.max_pooling import MaxPoolRule, MaxUnpoolRule
from backpack_layers.pooling import AdaptiveAvgPoolRule, AvgPoolRule, LPPoolRule
from tests.layers.execution import check_rule, record
from tests.oracle import assert_close

SIZES = {1: (9,), 2: (8, 7), 3: (5, 6, 7)}
CASES: dict[type[LayerRule], list[tuple[str, dict[str, Any]]]] = {
    AvgPoolRule: [
        ("AvgPool", {"kernel_size": 2}),
        ("AvgPool", {"kernel_size": 3, "stride": 2, "padding": 1}),
        ("AvgPool", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
        ("AvgPool", {"kernel_size": 2, "stride": 3, "ceil_mode": True}),
    ],
    AdaptiveAvgPoolRule: [
        ("AdaptiveAvgPool", {"output_size": 1}),
        ("AdaptiveAvgPool", {"output_size": 3}),
    ],
    LPPoolRule: [
        ("LPPool", {"norm_type": 2, "kernel_size": 2}),
        ("LPPool", {"norm_type": 3.5, "kernel_size": 3, "stride": 2}),
        ("LPPool", {"norm_type": 3, "kernel_size": 2, "stride": 3, "ceil_mode": True}),
        ("LPPool", {"norm_type": 1, "kernel_size": 2}),
    ],
    MaxPoolRule: [
        ("MaxPool", {"kernel_size": 2}),
        ("MaxPool", {"kernel_size": 3, "stride": 1, "return_indices": True}),
        ("MaxPool", {"kernel_size": 3, "stride": 2, "padding": 1}),
        ("MaxPool", {"kernel_size": 2, "dilation": 2, "stride": 2, "ceil_mode": True}),
        ("AdaptiveMaxPool", {"output_size": 1}),
        ("AdaptiveMaxPool", {"output_size": 3, "return_indices": True}),
    ],
}
FLAT = [(rule, name, options) for rule, rows in CASES.items() for name, options in rows]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("rule", "name", "options"), FLAT, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pooling(
    dims: int, rule: type[LayerRule], name: str, options: dict[str, Any], batch: int
) -> None:
    # Positive, so that every power has a derivative.
    x = torch.rand(batch, 2, *SIZES[dims]).double() + 0.1
    check_rule(rule(), record(getattr(nn, f"{name}{dims}d")(**options), x))


OTHERS: list[tuple[type[LayerRule], nn.Module]] = [
    (AvgPoolRule, nn.AvgPool2d((3, 2), (1, 2), (1, 0), divisor_override=5)),
    (AvgPoolRule, nn.AvgPool3d(2, divisor_override=3)),
    (AdaptiveAvgPoolRule, nn.AdaptiveAvgPool2d((None, 3))),
    (AdaptiveAvgPoolRule, nn.AdaptiveAvgPool3d((1, 2, None))),
    (LPPoolRule, nn.LPPool2d(2, (3, 2), (1, 2))),
    (MaxPoolRule, nn.MaxPool2d((3, 2), (1, 2), (1, 0), (2, 1))),
    (MaxPoolRule, nn.AdaptiveMaxPool2d((None, 3))),
    (MaxPoolRule, nn.FractionalMaxPool2d(2, output_ratio=0.6, return_indices=True)),
    (MaxPoolRule, nn.FractionalMaxPool3d(2, output_size=3, return_indices=True)),
]


@pytest.mark.parametrize(("rule", "module"), OTHERS, ids=str)
def test_settings_that_differ_between_axes(rule: type[LayerRule], module: nn.Module) -> None:
    dims = 3 if "3d" in type(module).__name__ else 2
    check_rule(rule(), record(module, torch.rand(2, 2, *SIZES[dims]).double() + 0.1))


def test_ties_go_where_autograd_sends_them() -> None:
    x = torch.randint(0, 2, (2, 3, 6, 6)).double()
    check_rule(MaxPoolRule(), record(nn.MaxPool2d(3, 2, padding=1), x))


def test_power_mean_of_zeros_has_no_gradient() -> None:
    run = record(nn.LPPool1d(2, 2), torch.zeros(1, 1, 4))
    product = LPPoolRule().jac_t_mat_prod(run.view, torch.ones(1, 1, 1, 2))[0]
    assert product is not None
    assert torch.equal(product, torch.zeros(1, 1, 1, 4))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unpooling(dims: int) -> None:
    x = torch.randn(2, 3, *SIZES[dims]).double()
    pooled, positions = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)(x)
    module = getattr(nn, f"MaxUnpool{dims}d")(2)
    check_rule(MaxUnpoolRule(), record(module, pooled, positions, output_size=x.shape))


def test_refusals() -> None:
    random = record(nn.FractionalMaxPool2d(2, output_size=3), torch.randn(1, 2, 6, 6))
    with pytest.raises(OverwrittenInputError, match="return_indices=True"):
        MaxPoolRule().jac_t_mat_prod(random.view, random.output.detach()[None])
    with pytest.raises(UnsupportedError, match="norm_type inf"):
        LPPoolRule().check(record(nn.LPPool1d(float("inf"), 2), torch.randn(1, 2, 6)).view)
    with pytest.raises(UnsupportedError, match="no batch axis"):
        AvgPoolRule().check(record(nn.AvgPool2d(2), torch.randn(2, 6, 6)).view)


@pytest.mark.parametrize("subsampling", [None, [2, 0]])
def test_maxima_are_where_autograd_saved_them(
    subsampling: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = extend(nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.Flatten()))
    lossfunc = extend(nn.CrossEntropyLoss())
    x, y = torch.rand(3, 1, 5, 5), torch.tensor([0, 1, 7])

    def diagonal() -> torch.Tensor:
        with backpack(DiagGGNExact(subsampling=subsampling)):
            loss.backward()
        return model[0].weight.diag_ggn_exact

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = lossfunc(model(x), y)
    expected = diagonal()  # with a second pooling: saved tensors are not ours to read
    with monkeypatch.context() as patch:  # nor where torch does not tell
        patch.setattr("backpack_core._torch._top_hooks", None)
        loss = lossfunc(model(x), y)
    assert_close(diagonal(), expected)
    loss = lossfunc(model(x), y)
    monkeypatch.delattr("torch.nn.functional.max_pool2d")
    assert_close(diagonal(), expected)
