"""Extensions and module extensions as third parties wrote them for the incumbent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack import extensions
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.custom_module.branching import Parallel, SumModule
from backpack.extensions.backprop_extension import FAIL_ERROR, FAIL_SILENT, FAIL_WARN
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from backpack.extensions.layout import FAMILIES
from backpack.extensions.mat_to_mat_jac_base import MatToJacMat
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from backpack.extensions.secondorder.hbp import (
    LossHessianStrategy,
)
from backpack.extensions.secondorder.sqrt_ggn import activations, custom_module, losses
from backpack.utils.subsampling import subsample
from backpack_core.errors import (
    AutodiffFallbackWarning,
    BackpackWarning,
    UnsupportedError,
    UsageError,
)
from tests.compat.nets import N, data, linear_net, run


class GradLinear(FirstOrderModuleExtension):
    """Individual gradients, written by hand."""

    def __init__(self, params: tuple[str, ...] = ("weight",)) -> None:
        super().__init__(params=list(params))
        self.checked = 0

    def check_hyperparameters_module_extension(self, ext: Any, module: Any, *grads: Any) -> None:
        self.checked += 1

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        assert bpQuantities is None
        chosen = ext.get_subsampling()
        inputs = subsample(module.input0, subsampling=chosen)
        return torch.einsum("no,ni->noi", subsample(g_out[0], subsampling=chosen), inputs)


class Grad(FirstOrderBackpropExtension):
    def __init__(self, table: dict[Any, Any], **settings: Any) -> None:
        super().__init__("mine", table, **settings)


@pytest.mark.parametrize("chosen", [None, [2, 0]])
def test_first_order(chosen: list[int] | None) -> None:
    cell = GradLinear()
    weight = run(
        linear_net(), *data(3), Grad({nn.Linear: cell}, subsampling=chosen),
        extensions.BatchGrad(subsampling=chosen),
    )[0]  # fmt: skip
    assert torch.allclose(weight.mine, weight.grad_batch)
    assert cell.checked == 2


def test_module_extension_of_a_known_extension_with_subsampling() -> None:
    extension = extensions.BatchGrad(subsampling=[3, 1])
    extension.set_module_extension(nn.Linear, GradLinear(), overwrite=True)
    weight = run(linear_net(), *data(3), extension)[0]
    assert weight.grad_batch.shape == (2, 3, 3)


def test_unknown_modules_raise() -> None:
    with pytest.raises(NotImplementedError, match=r"saving to mine .* Module .*Linear"):
        run(linear_net(), *data(3), Grad({}, fail_mode=FAIL_ERROR))


def test_unknown_modules_warn() -> None:
    with pytest.warns(BackpackWarning, match="saving to mine does not have an extension"):
        run(linear_net(), *data(3), Grad({}))


def test_unknown_modules_are_passed_over() -> None:
    weight = run(linear_net(), *data(3), Grad({}, fail_mode=FAIL_SILENT))[0]
    assert not hasattr(weight, "mine")


def test_fail_mode_is_compared_by_value() -> None:
    mode = "".join(["ERR", "OR"])
    with pytest.raises(NotImplementedError):
        run(linear_net(), *data(3), Grad({}, fail_mode=mode))
    with pytest.raises(AssertionError, match="no valid fail mode"):
        Grad({}, fail_mode="LOUD")


class Shift(nn.Module):
    """No plugin has a rule for it, and it uses its parameter in an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.shift.exp().sinh()


def test_fail_mode_of_a_built_in_extension() -> None:
    """Until it is told otherwise, it is exact where the incumbent passes over a parameter."""
    model, extension = nn.Sequential(Shift(), nn.Linear(4, 3)), extensions.BatchGrad()
    x, y = data(4)
    with pytest.warns(AutodiffFallbackWarning, match="Shift"):
        assert run(model, x, y, extension)[0].grad_batch.shape == (4, 4)
    del model[0].shift.grad_batch
    extension._fail_mode = FAIL_SILENT
    assert not hasattr(run(model, x, y, extension)[0], "grad_batch")
    extension._fail_mode = FAIL_WARN
    with pytest.warns(BackpackWarning, match="Shift"):
        run(model, x, y, extension)
    assert extension._fail_mode == FAIL_WARN
    with pytest.raises(AssertionError, match="no valid fail mode"):
        extension._fail_mode = "LOUD"


def test_set_module_extension() -> None:
    extension = Grad({nn.Linear: GradLinear()}, fail_mode=FAIL_WARN)
    with pytest.raises(ValueError, match="overwrite"):
        extension.set_module_extension(nn.Linear, GradLinear())
    extension.set_module_extension(module=nn.Linear, extension=GradLinear(), overwrite=True)
    with pytest.raises(UsageError):
        extension.set_module_extension(nn.Conv2d, "not a module extension")  # type: ignore[arg-type]


def test_a_parameter_without_a_method() -> None:
    with pytest.raises(NotImplementedError, match="'bias'"):
        GradLinear(("weight", "bias"))


class Sqrt(SecondOrderBackpropExtension):
    """A square root of the generalised Gauss-Newton matrix, by a table."""

    def __init__(self, table: dict[Any, Any], **settings: Any) -> None:
        self.loss_hessian_strategy = LossHessianStrategy.EXACT
        super().__init__("mine", table, **settings)

    def accumulate_backpropagated_quantities(self, existing: Tensor, other: Tensor) -> Tensor:
        return existing + other


class SqrtLinear(MatToJacMat):
    def __init__(self) -> None:
        super().__init__(LinearDerivatives(), params=["weight"])

    def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> Tensor:
        product: Tensor = self.derivatives.param_mjp(  # type: ignore[attr-defined]
            "weight", module, g_inp, g_out, backproped, sum_batch=False,
            subsampling=ext.get_subsampling(),
        )  # fmt: skip
        return product


TABLE = {
    nn.CrossEntropyLoss: losses.SqrtGGNCrossEntropyLoss(),
    nn.Linear: SqrtLinear(),
    nn.Sigmoid: activations.SqrtGGNSigmoid(),
    SumModule: custom_module.SqrtGGNSumModule(),
}


@pytest.mark.parametrize("chosen", [None, [2, 0]])
def test_second_order(chosen: list[int] | None) -> None:
    weight = run(
        linear_net(), *data(3), Sqrt(dict(TABLE), subsampling=chosen),
        extensions.SqrtGGNExact(subsampling=chosen),
    )[0]  # fmt: skip
    assert torch.allclose(weight.mine, weight.sqrt_ggn_exact)


def test_second_order_with_branches() -> None:
    branches = Parallel(nn.Linear(3, 2), nn.Sequential(nn.Sigmoid(), nn.Linear(3, 2)))
    model = nn.Sequential(nn.Linear(3, 3), branches)
    weight = run(model, *data(3), Sqrt(dict(TABLE)), extensions.SqrtGGNExact())[0]
    assert torch.allclose(weight.mine, weight.sqrt_ggn_exact)


def test_second_order_without_accumulation() -> None:
    class Alone(Sqrt):
        def accumulate_backpropagated_quantities(self, existing: Any, other: Any) -> Any:
            return SecondOrderBackpropExtension.accumulate_backpropagated_quantities(
                self, existing, other
            )

    branches = Parallel(nn.Linear(3, 2), nn.Linear(3, 2))
    with pytest.raises(NotImplementedError, match="No accumulation rule"):
        run(nn.Sequential(nn.Linear(3, 3), branches), *data(3), Alone(dict(TABLE)))


@pytest.mark.parametrize("missing", [nn.CrossEntropyLoss, nn.Sigmoid, nn.Linear])
def test_second_order_unknown_modules_raise(missing: type[nn.Module]) -> None:
    table = {kind: cell for kind, cell in TABLE.items() if kind is not missing}
    with pytest.raises(NotImplementedError, match=missing.__name__):
        run(linear_net(), *data(3), Sqrt(table))


def test_second_order_does_not_pass_through_functions() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).sin())

    with pytest.raises(UnsupportedError, match="the quantity of Sqrt"):
        run(Net(), *data(3), Sqrt(dict(TABLE)))


def test_closures_can_be_handed_on() -> None:
    """What travels may be anything."""

    class Start(ModuleExtension):
        def backpropagate(self, ext: Any, module: Any, *rest: Any) -> Any:
            return ["loss"]

    class Step(ModuleExtension):
        def __init__(self) -> None:
            super().__init__(["weight"])

        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, arrived: Any) -> Any:
            return list(arrived)

        def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, arrived: Any) -> Any:
            return [*arrived, type(module).__name__]

    table = {nn.CrossEntropyLoss: Start(), nn.Linear: Step(), nn.Sigmoid: Step()}
    table[nn.Sigmoid].params = []
    weight = run(linear_net(), *data(3), Sqrt(table))[0]
    assert weight.mine == ["loss", "Linear", "Sigmoid"]


def test_backpropagate_not_written() -> None:
    table = {**TABLE, nn.Sigmoid: ModuleExtension()}
    with pytest.warns(UserWarning, match="not been overwritten"), pytest.raises(RuntimeError):
        run(linear_net(), *data(3), Sqrt(table))


# Every class of the incumbent for a pair (extension, layer) gives what the extension itself gives.

NETS: dict[str, tuple[Any, tuple[int, ...], tuple[str, ...]]] = {
    "mlp": (linear_net, (3,), ("Linear", "Sigmoid")),
    "relu": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh(), nn.Linear(3, 2)),
        (3,), ("Linear", "ReLU", "Tanh"),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.ZeroPad2d(1), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(8, 2),
        ),
        (1, 5, 5), ("Conv2d", "MaxPool2d", "ZeroPad2d", "AvgPool2d", "Flatten", "Linear"),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose1d(1, 2, 2), nn.Flatten(), nn.Linear(8, 2)),
        (1, 3), ("ConvTranspose1d", "Flatten", "Linear"),
    ),
    "normalised": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2)),
        (3,), ("Linear", "BatchNorm1d"),
    ),
}  # fmt: skip


def cells(package: str, prefix: str, layers: tuple[str, ...]) -> dict[Any, Any] | None:
    """A table of the incumbent's classes, or ``None`` where it has none for a layer."""
    from importlib import import_module

    family = next(f for f in FAMILIES if f.package == package)
    found = {}
    second_order = not package.startswith("firstorder")
    for layer in (*layers, *(("CrossEntropyLoss",) if second_order else ())):
        stem = "BatchNormNd" if layer == "BatchNorm1d" else layer
        where = next((w for w, ls in family.submodules.items() if stem in ls.split()), None)
        if where is None:
            if second_order:
                return None
            continue
        regular = {v: k for k, v in family.names.items()}
        module = import_module(f"backpack.extensions.{package}.{where}")
        for start in (prefix, prefix.removeprefix("Batch")):
            name = regular.get(start + stem, start + stem)
            if hasattr(module, name):
                found[getattr(nn, layer)] = getattr(module, name)()
                break
    return found


CELLS = [
    ("firstorder.batch_grad", "BatchGrad", "BatchGrad"),
    ("firstorder.batch_l2_grad", "BatchL2", "BatchL2Grad"),
    ("firstorder.sum_grad_squared", "SGS", "SumGradSquared"),
    ("firstorder.variance", "Variance", "Variance"),
    ("secondorder.diag_ggn", "DiagGGN", "DiagGGNExact"),
    ("secondorder.diag_ggn", "BatchDiagGGN", "BatchDiagGGNExact"),
    ("secondorder.sqrt_ggn", "SqrtGGN", "SqrtGGNExact"),
    ("secondorder.diag_hessian", "DiagH", "DiagHessian"),
    ("secondorder.diag_hessian", "BatchDiagH", "BatchDiagHessian"),
    ("secondorder.hbp", "HBP", "KFLR"),
    ("secondorder.hbp", "HBP", "KFRA"),
    ("curvmatprod.ggnmp", "GGNMP", "GGNMP"),
    ("curvmatprod.hmp", "HMP", "HMP"),
    ("curvmatprod.pchmp", "PCHMP", "PCHMP"),
]


TABLES = [
    pytest.param(table, name, net, id=f"{prefix}-{name}-{net}")
    for net, (_, _, layers) in NETS.items()
    for package, prefix, name in CELLS
    if (table := cells(package, prefix, layers)) is not None
]


@pytest.mark.parametrize(("table", "name", "net"), TABLES)
def test_cells(table: dict[Any, Any], name: str, net: str) -> None:
    build, shape, _ = NETS[net]
    model, (x, y) = build(), data(*shape)
    expected = run(model, x, y, getattr(extensions, name)())
    extension = getattr(extensions, name)()
    wanted = [getattr(p, extension.savefield) for p in expected]
    for parameter in expected:
        delattr(parameter, extension.savefield)
    for kind, cell in table.items():
        extension.set_module_extension(kind, cell, overwrite=True)
    found = [getattr(p, extension.savefield) for p in run(model, x, y, extension)]
    for ours, reference, parameter in zip(found, wanted, expected, strict=True):
        _compare(ours, reference, parameter)


def _compare(ours: Any, reference: Any, parameter: Tensor) -> None:
    if callable(ours):
        vector = torch.randn(2, *parameter.shape)
        ours, reference = [ours(vector)], [reference(vector)]
    if not isinstance(ours, list):
        ours, reference = [ours], [reference]
    for one, other in zip(ours, reference, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_sampled_root_from_a_table() -> None:
    extension = Sqrt(dict(TABLE))
    extension.loss_hessian_strategy = LossHessianStrategy.SAMPLING
    extension.get_num_mc_samples = lambda: 5  # type: ignore[attr-defined]
    assert run(linear_net(), *data(3), extension)[0].mine.shape == (5, N, 3, 3)
    extension.loss_hessian_strategy = LossHessianStrategy.SUM
    with pytest.raises(NotImplementedError, match="Unknown hessian strategy sum"):
        run(linear_net(), *data(3), extension)


def test_pchmp_mode() -> None:
    assert extensions.PCHMP(modify="abs").get_modification_mode() == "abs"


def test_accumulation_of_a_built_in_extension() -> None:
    from backpack_products import Columns

    first, second = Columns.start("one", torch.ones(1, 2)), Columns.start("two", torch.ones(3, 2))
    both = extensions.DiagGGNExact().accumulate_backpropagated_quantities(first, second)
    assert both.mat.shape == (4, 2)
