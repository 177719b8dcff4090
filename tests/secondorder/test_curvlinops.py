"""Kronecker factors from and to curvlinops, where that is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError, UsageError
from backpack_core.extensions import EKFAC, KFLR, DiagGGNExact
from backpack_secondorder.blocks import BlockDiagonal
from backpack_secondorder.over_data import GGN, Fisher, Hessian
from tests.oracle import assert_close

# Not in the environment of the tests: it requires the package whose import name compat takes.
curvlinops = pytest.importorskip("curvlinops", exc_type=ImportError)

from backpack_secondorder.curvlinops import from_curvlinops, to_curvlinops  # noqa: E402

Data = list[tuple[Tensor, Tensor]]


def mlp() -> tuple[nn.Module, nn.Module, Data]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, nn.CrossEntropyLoss(), [(torch.randn(5, 3), torch.randint(0, 3, (5,)))]


def conv() -> tuple[nn.Module, nn.Module, Data]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    return model, nn.CrossEntropyLoss(), [(torch.randn(5, 1, 3, 3), torch.randint(0, 3, (5,)))]


def ours(extension: Any, given: Any) -> BlockDiagonal:
    model, lossfunc, ((inputs, target),) = given
    extend(model), extend(lossfunc)
    with backpack(extension):
        lossfunc(model(inputs), target).backward()
    return BlockDiagonal.of(model, extension.savefield)


def theirs(name: str, given: Any, **settings: Any) -> Any:
    model, lossfunc, data = given
    return getattr(curvlinops, name)(model, lossfunc, [*model.parameters()], data, **settings)


KFAC = {"fisher_type": "type-2", "separate_weight_and_bias": True}


@pytest.mark.parametrize("net", [mlp, conv])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kfac(net: Any, sharing: Any) -> None:
    given = net()
    operator = theirs("KFACLinearOperator", given, kfac_approx=sharing, **KFAC)
    blocks, found = ours(KFLR(sharing), given), from_curvlinops(operator, given[0])
    for name in blocks:
        if name.endswith("weight") or sharing == "reduce":
            assert_close(found[name].dense(), blocks[name].dense())
    vector = torch.randn(operator.shape[0])
    assert_close(found @ vector, operator @ vector)
    assert_close(to_curvlinops(found, *given, kfac_approx=sharing) @ vector, operator @ vector)


@pytest.mark.parametrize("net", [mlp])
def test_ekfac(net: Any) -> None:
    given = net()
    operator = theirs("EKFACLinearOperator", given, **KFAC)
    blocks, found = ours(EKFAC(None), given), from_curvlinops(operator, given[0])
    vector = torch.randn(operator.shape[0])
    assert_close(found @ vector, operator @ vector)
    for name in blocks:
        assert_close(found[name].dense(), blocks[name].dense())
    assert_close(to_curvlinops(found, *given) @ vector, operator @ vector)


@pytest.mark.parametrize("net", [mlp, conv])
def test_operators(net: Any) -> None:
    given = net()
    model, lossfunc, data = given
    more = (model, lossfunc, [*data, (data[0][0][:2], data[0][1][:2])])
    for mine, name, settings in (
        (GGN(*more), "GGNLinearOperator", {}),
        (Hessian(*more), "HessianLinearOperator", {}),
        (Fisher(*more, kind="empirical"), "EFLinearOperator", {}),
    ):
        operator = theirs(name, more, **settings)
        assert_close(mine.dense(), operator @ torch.eye(operator.shape[0]))


def test_what_is_refused() -> None:
    given = conv()
    model = given[0]
    joint = theirs("KFACLinearOperator", given, separate_weight_and_bias=False)
    with pytest.raises(UnsupportedError, match="separate_weight_and_bias=True"):
        from_curvlinops(joint, model)
    blocks = ours(KFLR("expand"), given)
    with pytest.raises(UnsupportedError, match="weight and bias of '0'"):
        to_curvlinops(blocks, *given)
    with pytest.raises(UnsupportedError, match="two Kronecker factors for a weight"):
        to_curvlinops(ours(DiagGGNExact(), given), *given)
    with pytest.raises(UsageError, match=r"have none for '0.weight'"):
        to_curvlinops({}, *given)
