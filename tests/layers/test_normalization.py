from __future__ import annotations

import pytest
import torch
from torch import nn

from backpack_core.contract.rules import LayerRule
from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.normalization import (
    BatchNormRule,
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    RMSNormRule,
)
from backpack_layers.response_norm import LocalResponseNormRule
from tests.layers.execution import check_rule, close, record

CASES: list[tuple[type[LayerRule], nn.Module, tuple[int, ...]]] = [
    (LayerNormRule, nn.LayerNorm(4), (4,)),
    (LayerNormRule, nn.LayerNorm(4, eps=0.3), (3, 4)),
    (LayerNormRule, nn.LayerNorm((3, 4), bias=False), (2, 3, 4)),
    (LayerNormRule, nn.LayerNorm((2, 3, 4), elementwise_affine=False), (2, 3, 4)),
    (RMSNormRule, nn.RMSNorm(4), (4,)),
    (RMSNormRule, nn.RMSNorm((3, 4), eps=0.1), (2, 3, 4)),
    (RMSNormRule, nn.RMSNorm(4, elementwise_affine=False), (3, 4)),
    (GroupNormRule, nn.GroupNorm(2, 4), (4, 3)),
    (GroupNormRule, nn.GroupNorm(1, 4), (4,)),
    (GroupNormRule, nn.GroupNorm(2, 4, affine=False), (4, 2, 3)),
    (InstanceNormRule, nn.InstanceNorm1d(2), (2, 4)),
    (InstanceNormRule, nn.InstanceNorm2d(2, affine=True), (2, 4, 3)),
    (InstanceNormRule, nn.InstanceNorm2d(2, affine=True, track_running_stats=True), (2, 4, 3)),
    (InstanceNormRule, nn.InstanceNorm2d(2, track_running_stats=True).eval(), (2, 4, 3)),
    (InstanceNormRule, nn.InstanceNorm3d(2, affine=True).eval(), (2, 2, 3, 2)),
    (BatchNormRule, nn.BatchNorm1d(3).eval(), (3,)),
    (BatchNormRule, nn.BatchNorm1d(3, affine=False).eval(), (3, 2)),
    (BatchNormRule, nn.BatchNorm2d(3, eps=0.2).eval(), (3, 2, 2)),
    (BatchNormRule, nn.BatchNorm3d(3).eval(), (3, 2, 1, 2)),
    (BatchNormRule, nn.SyncBatchNorm(3).eval(), (3, 2)),
    (LocalResponseNormRule, nn.LocalResponseNorm(2, alpha=0.4, beta=0.6, k=1.3), (4, 3)),
    (LocalResponseNormRule, nn.LocalResponseNorm(3, alpha=2.0), (4, 3, 2)),
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("rule", "module", "shape"), CASES, ids=str)
def test_normalization(
    rule: type[LayerRule], module: nn.Module, shape: tuple[int, ...], batch: int
) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    check_rule(rule(), record(module, torch.randn(batch, *shape).double()))


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)]
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batch_statistics_mix_samples(module: nn.Module, mode: str) -> None:
    run = record(module.train(mode == "train"), torch.randn(4, 2))
    tracked = getattr(module, "running_mean", None) is not None
    assert BatchNormRule().mixes_samples(run.view) == (mode == "train" or not tracked)


def test_graphs_through_a_quantity() -> None:
    run = record(nn.LayerNorm(4), torch.randn(3, 4).double())
    view = View(run.view.call)  # as in a pass with create_graph=True
    mat = torch.randn(1, 3, 4).double()
    with torch.no_grad():
        LayerNormRule().jac_t_mat_prod(view, mat)  # what it leaves on the view has no graph
    (found,) = LayerNormRule().jac_t_mat_prod(view, mat)
    (expected,) = torch.autograd.grad(run.output, run.leaf, mat[0], create_graph=True)
    assert found is not None
    gradients = [torch.autograd.grad((t**3).sum(), run.leaf)[0] for t in (found[0], expected)]
    close(*gradients, "a gradient of the product")


def test_half_precision() -> None:
    x = torch.randn(3, 8).bfloat16()
    mat = torch.randn(2, 3, 8).bfloat16()
    exact = LayerNormRule().jac_t_mat_prod(record(nn.LayerNorm(8), x.double()).view, mat.double())
    rough = LayerNormRule().jac_t_mat_prod(record(nn.LayerNorm(8), x).view, mat)
    assert exact[0] is not None
    assert rough[0] is not None
    close(rough[0].double(), exact[0], "jac_t_mat_prod", tolerance=0.03)


@pytest.mark.parametrize(
    ("rule", "module", "shape"),
    [
        (LayerNormRule, nn.LayerNorm((3, 4)), (3, 4)),
        (RMSNormRule, nn.RMSNorm(4), (4,)),
        (InstanceNormRule, nn.InstanceNorm1d(3), (3, 4)),
    ],
    ids=str,
)
def test_no_batch_axis(rule: type[LayerRule], module: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match="no batch axis"):
        rule().check(record(module, torch.randn(shape)).view)
