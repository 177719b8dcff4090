from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from backpack_core.contract.rules import LayerRule
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.record.view import View
from backpack_layers.normalization import (
    BatchNormRule,
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    RMSNormRule,
)
from backpack_layers.response_norm import LocalResponseNormRule
from tests import oracle
from tests.cases import Problem
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


HALF = [torch.float16, torch.bfloat16]
NORMS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "layer": (nn.LayerNorm(8), (8,)),
    "root mean square": (nn.RMSNorm(8), (8,)),
    "root mean square, eps": (nn.RMSNorm(8, eps=1e-6), (8,)),
    "group": (nn.GroupNorm(2, 4), (4, 4)),
    "instance": (nn.InstanceNorm1d(4, affine=True), (4, 4)),
}


def _eps_of_torch(dtype: torch.dtype) -> float:
    """That of the dtype, or of single precision: with which torch gets closer to its output."""
    x = torch.full((1, 1), 2.0**-10, dtype=dtype)
    found = float(nn.functional.rms_norm(x, (1,)))
    known = [torch.finfo(each).eps for each in (dtype, torch.float32)]
    return min(known, key=lambda eps: abs(2.0**-10 / (2.0**-20 + eps) ** 0.5 - found))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (30.0, 1.0), (0.0, 1e3), (0.0, 1e-3)])
@pytest.mark.parametrize("name", NORMS)
def test_the_range_of_half_precision(
    name: str, mean: float, deviation: float, dtype: torch.dtype
) -> None:
    """Squares leave the range of float16, and torch's smallest variance is single precision's."""
    module, shape = NORMS[name]
    x = (torch.randn(4, *shape) * deviation + mean).to(dtype)
    exact = copy.deepcopy(module).double()
    if name == "root mean square":
        exact.eps = _eps_of_torch(dtype)  # type: ignore[assignment]
    problem = Problem(copy.deepcopy(module).to(dtype), (x,), nn.MSELoss(reduction="sum"), x * 0)
    problem.run(BatchGrad(), DiagGGNExact())
    output = exact(x.double()).detach()
    plain = copy.deepcopy(exact)
    for parameter, fill in zip(plain.parameters(), (1.0, 0.0), strict=False):
        nn.init.constant_(parameter, fill)
    inp = plain(x.double()).detach()
    weight = problem.parameters[0]
    axes = [*range(2, x.dim())] if name in ("group", "instance") else []
    gradient, square = 2 * output * inp, 2 * inp**2
    if axes:  # one column for each position
        gradient, square = gradient.sum(axes), square.sum(axes)
    rounding = 40 * torch.finfo(dtype).eps
    oracle.assert_close(weight.grad_batch.double(), gradient, rounding)
    oracle.assert_close(weight.diag_ggn_exact.double(), square.sum(0), rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(1), (1,)),
        (nn.GroupNorm(4, 4), (4, 1, 1)),
        (nn.LayerNorm(4), (4,)),
        (nn.GroupNorm(1, 2), (2, 3)),
    ],
    ids=str,
)
def test_rows_of_equal_entries(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Their gradient is zero; torch's has rounding errors, divided by a small deviation."""
    x = (10 * torch.randn(5, *[1] * len(shape))).expand(5, *shape).to(dtype)
    problem = Problem(module.to(dtype), (x,), nn.MSELoss(), torch.randn(5, *shape, dtype=dtype))
    problem.run(BatchGrad(), check="always")
    assert float(problem.parameters[0].grad_batch.abs().max()) < 1e-3


@pytest.mark.parametrize("name", ["layer", "group", "instance"])
def test_means_beyond_the_deviation(name: str) -> None:
    """Sums are compared with a gradient that is rounded as the terms of ``x - μ`` are."""
    module, shape = NORMS[name]
    for mean in (1e3, 1e4):
        x = torch.randn(16, *shape, dtype=torch.float32) + mean
        problem = Problem(copy.deepcopy(module).float(), (x,), nn.MSELoss(), torch.randn_like(x))
        problem.run(BatchGrad(), DiagGGNExact(), check="always")
