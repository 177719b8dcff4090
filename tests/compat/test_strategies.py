"""Kronecker factors by strategies: ``HBP`` and what goes by its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import backpack, extend, extensions
from backpack.extensions.secondorder.hbp import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
)
from backpack.utils import kroneckers
from backpack_core import extensions as core
from backpack_core.errors import UnsupportedError
from tests.compat.nets import N, data, linear_net, run


def test_hbp_by_strategies() -> None:
    botev, chen = ExpectationApproximation.BOTEV_MARTENS, ExpectationApproximation.CHEN
    strategies = ("ggn", LossHessianStrategy.EXACT, BackpropStrategy.SQRT, botev)
    mine = extensions.HBP(*strategies, savefield="mine")
    found = (
        mine.get_curv_type(), mine.get_loss_hessian_strategy(), mine.get_backprop_strategy(),
        mine.get_ea_strategy(),
    )  # fmt: skip
    assert found == strategies
    weight = run(linear_net(), *data(3), mine, extensions.KFLR())[0]
    for ours, reference in zip(weight.mine, weight.kflr, strict=True):
        assert torch.allclose(ours, reference)
    with pytest.raises(NotImplementedError, match=r"averaged .* Use KFAC, KFLR or KFRA"):
        extensions.HBP(*strategies[:3], chen)
    with pytest.raises(NotImplementedError, match="positive semi-definite"):
        extensions.HBP("hessian", *strategies[1:])
    with pytest.raises(NotImplementedError, match="an average for SUM"):
        extensions.HBP("ggn", LossHessianStrategy.SUM, BackpropStrategy.SQRT, botev)


AVERAGE = (
    LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE,
    ExpectationApproximation.BOTEV_MARTENS,
)  # fmt: skip


def averaged_hessian_net() -> nn.Sequential:
    """Diagonal and dense second derivatives, and an operation between modules' outputs."""
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softmax(dim=1), nn.Linear(4, 2)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_averaged_hessian_of_one_sample_is_the_block(reduction: str) -> None:
    model, lossfunc = averaged_hessian_net(), nn.CrossEntropyLoss(reduction=reduction)
    x, y = torch.randn(1, 3), torch.tensor([1])
    loss = 0.5 * extend(lossfunc)(extend(model)(x), y)
    with backpack(extensions.HBP("hessian", *AVERAGE)):
        loss.backward()
    for name, parameter in model.named_parameters():

        def loss_of(value: Tensor, name: str = name) -> Tensor:
            values = {**dict(model.named_parameters()), name: value}
            return 0.5 * lossfunc.forward(torch.func.functional_call(model, values, (x,)), y)

        expected = torch.autograd.functional.hessian(loss_of, parameter.detach())
        size = parameter.numel()
        found = kroneckers.kfacs_to_mat(parameter.hbp)
        assert found is not None
        assert torch.allclose(found, expected.reshape(size, size), rtol=1e-10, atol=1e-12)


def test_averaged_hessian_by_its_recursion() -> None:
    """For a batch: averages on the way, and the sum of what each activation adds."""
    model = linear_net()
    x, y = data(3)
    parameters = run(model, x, y, extensions.HBP("hessian", *AVERAGE))
    hidden = model[0](x).detach().requires_grad_()
    active = hidden.sigmoid()
    logits = model[2](active)
    loss = nn.functional.cross_entropy(logits, y)
    gradient = torch.autograd.grad(loss, active)[0]
    p = logits.detach().softmax(1)
    top = (torch.diag_embed(p) - torch.einsum("ni,nj->nij", p, p)).sum(0) / N
    back = model[2].weight.T @ top @ model[2].weight
    slope = (active * (1 - active)).detach()
    bend = (slope * (1 - 2 * active)).detach()
    middle = torch.einsum("ni,ij,nj->ij", slope, back, slope) / N
    middle = middle + (bend * gradient).sum(0).diag()
    outer, inner = parameters[0].hbp
    assert torch.allclose(outer, middle, rtol=1e-10, atol=1e-12)
    assert torch.allclose(inner, x.T @ x / N, rtol=1e-10, atol=1e-12)


def test_averaged_hessian_refuses_unknown_second_derivatives() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).sin())

    with pytest.raises(UnsupportedError, match=r"'Sin'.*linear"):
        run(Net(), *data(3), extensions.HBP("hessian", *AVERAGE))


def test_kfac_has_the_strategies_of_its_name() -> None:
    sampled = extensions.KFAC(mc_samples=3)
    assert sampled.get_num_mc_samples() == 3
    assert sampled.get_loss_hessian_strategy() == LossHessianStrategy.SAMPLING
    torch.manual_seed(3)
    model, (x, y) = linear_net(), data(3)
    torch.manual_seed(4)
    expected = list(run(model, x, y, extensions.KFAC(mc_samples=3))[0].kfac)
    from backpack.extensions.secondorder.hbp.activations import HBPSigmoid
    from backpack.extensions.secondorder.hbp.linear import HBPLinear
    from backpack.extensions.secondorder.hbp.losses import HBPCrossEntropyLoss

    cells = ((nn.Linear, HBPLinear()), (nn.Sigmoid, HBPSigmoid()))
    for kind, cell in (*cells, (nn.CrossEntropyLoss, HBPCrossEntropyLoss())):
        sampled.set_module_extension(kind, cell, overwrite=True)
    torch.manual_seed(4)
    found = run(model, x, y, sampled)[0].kfac
    for ours, reference in zip(found, expected, strict=True):
        assert torch.allclose(ours, reference)


@pytest.mark.parametrize("sharing", ["kfc", "expand", "reduce"])
@pytest.mark.parametrize("name", ["KFLR", "KFRA", "KFAC"])
def test_positions_share_a_weight_as_asked(name: str, sharing: Any) -> None:
    def factors(extension: Any) -> list[Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Conv1d(2, 2, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(6, 2))
        return list(getattr(run(model, *data(2, 4), extension)[0], extension.savefield))

    found = factors(getattr(extensions, name)(weight_sharing=sharing))
    expected = factors(getattr(core, name)(weight_sharing=sharing))
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference)


def test_unknown_weight_sharing() -> None:
    with pytest.raises(ValueError, match="weight_sharing must be one of 'kfc', 'expand', 'reduce'"):
        extensions.KFAC(weight_sharing="sum")  # type: ignore[arg-type]
