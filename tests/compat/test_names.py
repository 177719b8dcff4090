"""Every public name of the incumbent is where it was, and is what it was."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys

import pytest
from torch import nn

import backpack
from backpack import extensions
from backpack.core.derivatives import DERIVATIVES
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.curvature import Curvature
from backpack.submodules import submodule
from backpack_core import Extension
from backpack_core import extensions as core
from backpack_products import FirstOrderExtension
from tests.compat.names import names
from tests.forks import python

TOP = ["backpack", "extend", "disable", "extensions", "memory_cleanup", "hook_store_io",
       "convert_module_to_backpack"]  # fmt: skip
SAVEFIELDS = {
    "BatchGrad": "grad_batch", "BatchL2Grad": "batch_l2", "SumGradSquared": "sum_grad_squared",
    "Variance": "variance", "DiagGGNExact": "diag_ggn_exact", "DiagGGNMC": "diag_ggn_mc",
    "BatchDiagGGNExact": "diag_ggn_exact_batch", "BatchDiagGGNMC": "diag_ggn_mc_batch",
    "SqrtGGNExact": "sqrt_ggn_exact", "SqrtGGNMC": "sqrt_ggn_mc", "DiagHessian": "diag_h",
    "BatchDiagHessian": "diag_h_batch", "KFAC": "kfac", "KFLR": "kflr", "KFRA": "kfra",
    "GGNMP": "ggnmp", "HMP": "hmp", "PCHMP": "pchmp",
}  # fmt: skip
SIGNATURES = {
    "BatchGrad": ["subsampling"], "DiagGGNExact": [], "DiagGGNMC": ["mc_samples"],
    "KFAC": ["mc_samples", "weight_sharing"], "KFLR": ["weight_sharing"],
    "KFRA": ["weight_sharing"], "SqrtGGNMC": ["mc_samples", "subsampling"], "GGNMP": ["savefield"],
    "PCHMP": ["savefield", "modify"], "DiagHessian": [], "Variance": [],
    "HBP": ["curv_type", "loss_hessian_strategy", "backprop_strategy", "ea_strategy", "savefield",
            "weight_sharing"],
}  # fmt: skip


@pytest.mark.parametrize("module", names())
def test_names(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names()[module] if not hasattr(found, name)] == []


def test_top_level() -> None:
    assert [name for name in TOP if not hasattr(backpack, name)] == []
    assert backpack.core.__name__ == "backpack.core"


@pytest.mark.parametrize("module", ["core.derivatives.conv2d", "extensions.secondorder.hbp.linear"])
def test_submodules_import_in_a_fresh_process(module: str) -> None:
    code = f"import backpack.{module} as found; print(found.__name__)"
    assert python(code).strip() == f"backpack.{module}"


@pytest.mark.parametrize("name", sorted(DERIVATIVES))
def test_derivatives_pickle(name: str) -> None:
    cls = DERIVATIVES[name]
    assert pickle.loads(pickle.dumps(cls)) is cls
    if not inspect.signature(cls).parameters.get("N"):
        assert type(pickle.loads(pickle.dumps(cls()))) is cls


def test_submodule_says_what_it_holds() -> None:
    made = submodule("backpack.made_for_a_test", {"one": 1, "_two": 2})
    try:
        assert importlib.import_module("backpack.made_for_a_test") is made
        assert made.__all__ == ["one"]
    finally:
        del sys.modules["backpack.made_for_a_test"], backpack.made_for_a_test  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SAVEFIELDS)
def test_extensions(name: str) -> None:
    extension = getattr(extensions, name)()
    assert extension.savefield == SAVEFIELDS[name]
    assert isinstance(extension, BackpropExtension)
    assert isinstance(extension, getattr(core, name))
    first_order = isinstance(extension, FirstOrderExtension)
    assert extension.expects_backpropagation_quantities() is not first_order
    assert extension.get_subsampling() is None
    assert extension._fail_mode == ("WARNING" if first_order else "ERROR")  # as in BackPACK 1.7.1
    extension.saved_quantities.save_quantity(1, 2, lambda a, b: a + b)
    extension.saved_quantities.save_quantity(1, 3, lambda a, b: a + b)
    assert extension.saved_quantities.retrieve_quantity(1, delete_old=False) == 5
    assert extension.saved_quantities.retrieve_quantity(1, delete_old=True) == 5
    assert extension.saved_quantities.retrieve_quantity(1, delete_old=True) is None


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert list(inspect.signature(getattr(extensions, name)).parameters) == SIGNATURES[name]


def test_the_core_s_own_extensions_count() -> None:
    from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
    from backpack.extensions.secondorder.base import SecondOrderBackpropExtension

    assert isinstance(core.BatchGrad(), FirstOrderBackpropExtension)
    assert not isinstance(core.BatchGrad(), SecondOrderBackpropExtension)
    assert issubclass(core.KFAC, SecondOrderBackpropExtension)
    assert not issubclass(Extension, FirstOrderBackpropExtension)
    assert isinstance(extensions.KFAC(), extensions.HBP)


def test_curvature() -> None:
    assert Curvature.require_residual(Curvature.HESSIAN)
    assert not Curvature.require_residual(Curvature.GGN)
    assert [Curvature.is_pch(c) for c in Curvature.CHOICES] == [False, False, True, True]
    Curvature.check_loss_hessian(False, Curvature.HESSIAN)
    with pytest.raises(ValueError, match="positive semi-definite"):
        Curvature.check_loss_hessian(False, Curvature.GGN)
    with pytest.raises(AttributeError, match="Unknown curvature"):
        Curvature.is_pch("none")


def test_strategies() -> None:
    from backpack.extensions.secondorder.hbp import (
        BackpropStrategy,
        ExpectationApproximation,
        LossHessianStrategy,
    )

    assert BackpropStrategy.is_sqrt("sqrt")
    assert BackpropStrategy.is_batch_average("average")
    assert ExpectationApproximation.should_average_param_jac(ExpectationApproximation.CHEN)
    LossHessianStrategy.check_exists("sum")
    with pytest.raises(AttributeError, match="Unknown loss Hessian strategy: mean"):
        LossHessianStrategy.check_exists("mean")


def test_wrong_strategy() -> None:
    from backpack.extensions.secondorder.diag_ggn import DiagGGN

    with pytest.raises(ValueError, match="Unknown hessian strategy: sum"):
        DiagGGN("sum", "field")


def test_module_classification() -> None:
    from backpack.utils.module_classification import is_loss, is_nll, is_no_op

    assert is_loss(nn.L1Loss())
    assert not is_nll(nn.L1Loss())
    assert is_nll(nn.MSELoss())
    assert is_no_op(nn.Sequential())
    assert not is_no_op(nn.ReLU())
