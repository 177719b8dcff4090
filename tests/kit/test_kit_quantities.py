"""Extensions that are wrong, and oracles that authors bring."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import View
from backpack_core.errors import PluginError, UnsupportedError, UsageError
from backpack_core.extensions import EKFAC, GGNMP, HMP, KFLR, KFRA, PCHMP, GGNGram
from backpack_core.testing import (
    Arguments,
    ExtensionCase,
    LossCase,
    Quantity,
    Reference,
    check_case,
    register_quantity,
)
from backpack_core.testing.network import SoftmaxLoss
from backpack_core.testing.quantities import quantity_of
from backpack_layers.loss_regression import MSELossRule
from backpack_products import (
    FirstOrderExtension,
    HessianLossRule,
    SampleProduct,
    SecondOrderExtension,
)
from backpack_products.operations import dense, square_sum, squared_norm
from backpack_secondorder.eigenbasis import KroneckerEigenbasis
from backpack_secondorder.factors import kronecker_factors
from backpack_secondorder.kronecker import KroneckerFactors
from backpack_secondorder.oracle_units import positive_curvature
from backpack_secondorder.propagators import LossSqrt


class OwnLoss(nn.MSELoss):
    """A class of its own, for a rule of its own."""


class Largest(FirstOrderExtension):
    """The largest individual gradient, entry by entry."""

    savefield = "largest"
    needs: tuple[Any, ...] = (dense,)

    def read(self, product: SampleProduct) -> Tensor:
        found = dense(product)[0]
        return found.amax(0) if len(found) else found.sum(0)


class FailsOnNone(Largest):
    def read(self, product: SampleProduct) -> Tensor:
        return dense(product)[0].amax(0)


class NeedsNothing(FailsOnNone):
    needs = ()


class LargestOfTwo(Largest):
    """Looks at two samples only."""

    def read(self, product: SampleProduct) -> Tensor:
        return super().read(product) if product.samples < 3 else dense(product)[0, :2].amax(0)


class Accumulating(Largest):
    """Adds to what it said before."""

    savefield = "accumulating"

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Tensor] = {}

    def read(self, product: SampleProduct) -> Tensor:
        key = f"{product.path}.{product.name}"
        self.before[key] = self.before.get(key, 0.0) + super().read(product)
        return self.before[key]


class OfTheFirstPass(Accumulating):
    """Keeps what it said first."""

    def read(self, product: SampleProduct) -> Tensor:
        key = f"{product.path}.{product.name}"
        return self.before.setdefault(key, Largest.read(self, product))


class RootOfTrace(SecondOrderExtension):
    """A root of a sum over columns, which those of two sets of columns do not add up to."""

    savefield = "root_of_trace"
    needs = (squared_norm,)
    columns_add = True

    def __init__(self) -> None:
        super().__init__(LossSqrt())

    def read(self, product: SampleProduct) -> Tensor:
        return squared_norm(product).sum().sqrt()


class SaysItAdds(Largest):
    """The largest of all samples is not the sum of those of two batches."""

    sums_samples = True


class WithoutBias(Largest):
    """Wrong for a weight whose bias is frozen."""

    def read(self, product: SampleProduct) -> Tensor:
        bias = getattr(product.module, "bias", None)
        return super().read(product) * (1 if bias is None or bias.requires_grad else 2)


class WrongForThreeAxes(Largest):
    def read(self, product: SampleProduct) -> Tensor:
        return super().read(product) * (1 if len(product.shape) < 3 else 2)


class IgnoresTheName(Largest):
    def __init__(self, subsampling: Sequence[int] | None = None, savefield: str | None = None):
        super().__init__(subsampling)


class Times(Largest):
    """Its constructor has an argument without a default."""

    def __init__(
        self,
        factor: float,
        subsampling: Sequence[int] | None = None,
        savefield: str | None = None,
    ) -> None:
        super().__init__(subsampling, savefield)
        self.factor = factor

    def read(self, product: SampleProduct) -> Tensor:
        return self.factor * super().read(product)


class InHalfPrecision(Largest):
    def read(self, product: SampleProduct) -> Tensor:
        found = super().read(product)
        return found * (2 if found.dtype is torch.bfloat16 else 1)


class Detached(Largest):
    def read(self, product: SampleProduct) -> Tensor:
        return super().read(product).detach()


class SavesLikeAnother(Largest):
    savefield = "grad_batch"


class Misspelt(Largest):
    neds = (dense,)


class WritesToParameters(Largest):
    def read(self, product: SampleProduct) -> Tensor:
        assert product.module is not None
        product.module.get_parameter(product.name).__dict__["own"] = 1
        return super().read(product)


QUANTITY = Quantity(lambda reference, name: reference.gradients(name).amax(0))


def faults(case: ExtensionCase) -> set[str]:
    return {result.check for result in check_case(case) if result.status == "failed"}


class EigenvaluesOfFactors(EKFAC):
    """Products of the factors' eigenvalues in place of the diagonal."""

    def read(self, product: SampleProduct) -> KroneckerEigenbasis:
        return kronecker_factors(product, "kfc").eigenbasis()


class AnotherBasis(EKFAC):
    """The right diagonal, of the same matrix, in a basis that is none of eigenvectors."""

    def read(self, product: SampleProduct) -> KroneckerEigenbasis:
        found = super().read(product)
        diagonal = square_sum(product).reshape(found.values.shape)
        eyes = [torch.eye(len(vectors)) for vectors in found.vectors]
        return KroneckerEigenbasis(eyes, diagonal, found.order)


class InnerIsSum(KFRA):
    """``A`` is not divided by the number of samples."""

    def read(self, product: Any) -> KroneckerFactors:
        found = super().read(product)
        return found.with_factors([found[0], *(3 * inner for inner in found[1:])])


class OwnSpectrum(GGNGram):
    """Each parameter has the spectrum of its own block."""

    def finish(self, values: Any, normalisers: Any = ()) -> Any:
        for block in super().finish(values, normalisers).values():
            block.spectrum = type(block.spectrum)(block.gram)
        return values


class Reversed(GGNGram):
    """Eigenvectors in the wrong order."""

    def finish(self, values: Any, normalisers: Any = ()) -> Any:
        spectrum = next(iter(super().finish(values, normalisers).values())).spectrum
        eigenvalues, vectors = spectrum._eigen
        rank = int((eigenvalues > 1e-10 * eigenvalues[0]).sum())
        turned = torch.cat([eigenvalues[:rank].flip(0), eigenvalues[rank:]])
        spectrum.__dict__["_eigen"] = (turned, vectors)
        return values


# Broken on purpose; each is held to the formula of its save field.
WRONG = {
    "PCHMP without a residual": partial(GGNMP, savefield="pchmp"),
    "PCHMP with the residual as it is": partial(HMP, savefield="pchmp"),
    "PCHMP with the other modification": partial(PCHMP, modify="abs"),
    "GGNGram of the own block": OwnSpectrum,
    "GGNGram, eigenvalues reversed": Reversed,
    "GGNGram of samples": partial(GGNGram, mc_samples=1),
    "EKFAC, eigenvalues of the factors": EigenvaluesOfFactors,
    "EKFAC in another basis": AnotherBasis,
    "EKFAC, exact": partial(EKFAC, mc_samples=None),
    "KFRA without averages": partial(KFLR, savefield="kfra"),
    "KFRA with a sum over samples": InnerIsSum,
    "KFLR with averages": partial(KFRA, savefield="kflr"),
    "KFAC, exact": partial(KFLR, savefield="kfac"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_formula_tells_it_from(name: str) -> None:
    (result,) = check_case(ExtensionCase(WRONG[name]), ["mean"])
    assert result.status == "failed"
    assert "relative error" in result.message, result.message


def test_positive_curvature_of_piecewise_linear_nets() -> None:
    """No residuals: the reference is the generalised Gauss-Newton block."""
    for layer, same in ((nn.ReLU, True), (nn.Tanh, False)):
        net = nn.Sequential(nn.Linear(2, 4), layer(), nn.Linear(4, 2)).double()
        reference = Reference(net, Arguments((torch.randn(3, 2),)), SoftmaxLoss())
        found = positive_curvature(reference, "0.weight", torch.abs)
        assert torch.allclose(found, reference.ggn("0.weight").sum(0)) is same


def test_an_author_brings_an_oracle() -> None:
    assert faults(ExtensionCase(Largest, QUANTITY)) == set()


def test_a_wrong_extension_is_found() -> None:
    case = ExtensionCase(LargestOfTwo, QUANTITY)
    assert faults(case) == {"mean"}
    alone = {result.check: result.ok for result in check_case(case, ["sum", "batch_of_one"])}
    assert alone == {"sum": False, "batch_of_one": True}


def test_an_extension_that_accumulates_is_found() -> None:
    assert "retain_graph" in faults(ExtensionCase(Accumulating, QUANTITY))


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (WithoutBias, "partly_frozen"),
        (InHalfPrecision, "bfloat16"),
        (WritesToParameters, "leaves_gradient_alone"),
        (FailsOnNone, "no_samples"),
        (NeedsNothing, "declarations"),
        (SaysItAdds, "samples_add"),
        (OfTheFirstPass, "retain_graph"),
        (Detached, "differentiable"),
        (SavesLikeAnother, "beside_others"),
        (WrongForThreeAxes, "shared_positions"),
        (IgnoresTheName, "savefield"),
    ],
)
def test_one_check_finds_it(kind: type[Largest], check: str) -> None:
    assert faults(ExtensionCase(kind, QUANTITY)) == {check}


def test_arguments_of_the_quantity_make_the_extension() -> None:
    twice = Quantity(lambda r, name: 2 * QUANTITY.expected(r, name), arguments={"factor": 2})
    assert not faults(ExtensionCase(Times, twice))


def test_columns_that_do_not_add_are_found() -> None:
    trace = Quantity(lambda r, name: r.ggn(name).diagonal(0, 1, 2).sum().sqrt(), needs="curvature")
    assert faults(ExtensionCase(RootOfTrace, trace)) == {"in_chunks"}


def test_what_is_declared_wrongly_does_not_run() -> None:
    case = ExtensionCase(Misspelt, QUANTITY)
    assert faults(case) == {"declarations"}
    assert not any(result.ok for result in check_case(case, ["mean", "sum"]))


class UnreducedTwice(MSELossRule):
    """Wrong for a loss that is not reduced."""

    module_types = (OwnLoss,)

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        found = super()._hessian_mat_prod(view, mat)
        return 2 * found if view.module.reduction == "none" else found


class DrawsNumbers(MSELossRule):
    module_types = (OwnLoss,)

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        torch.rand(1)
        return super()._hessian_mat_prod(view, mat)


class KeepsState(MSELossRule):
    module_types = (OwnLoss,)

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        return super()._hessian_mat_prod(view, mat)


class TwiceTheSamples(MSELossRule):
    module_types = (OwnLoss,)

    def _sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        return 2 * super()._sqrt_hessian_sampled(view, samples)


class SharesTheDraws(MSELossRule):
    """Right for each sample, and wrong where samples meet: in tied weights, or in one gradient."""

    module_types = (OwnLoss,)

    def _sqrt_hessian_sampled(self, view: View, samples: int) -> Tensor:
        root = super()._sqrt_hessian_sampled(view, samples)
        return root[:, :1].expand_as(root)


class WeightedLoss(nn.Module):
    """Squares, with a weight for each class, which the first samples of the case do not have."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction == "none":
            raise ValueError("reduction must be mean or sum")
        self.reduction = reduction
        self.register_buffer("weight", torch.linspace(1.0, 2.0, 5))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        losses = self.weight[label] * x.square().sum(1)
        return losses.mean() if self.reduction == "mean" else losses.sum()


class WeightedRule(HessianLossRule):
    module_types = (WeightedLoss,)
    hessian_is_psd = True

    def normalisation(self, view: View) -> float:
        return 1 / view.full.batch_size if view.module.reduction == "mean" else 1.0

    def weight(self, view: View) -> Tensor:
        return view.parameter("weight")[view.tensor_input(1)]

    def _sqrt_hessian(self, view: View) -> Tensor:
        size = view.input_shape[1]
        root = (2 * self.normalisation(view) * self.weight(view)).sqrt()
        return root.unsqueeze(1) * torch.eye(size, dtype=root.dtype).unsqueeze(1)

    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return 2 * self.normalisation(view) * self.weight(view).unsqueeze(1) * mat


class OneClassIsWrong(WeightedRule):
    def weight(self, view: View) -> Tensor:
        label = view.tensor_input(1)
        return super().weight(view) * torch.where(label == 0, 0.9, 1.0)


class WrongForManyColumns(WeightedRule):
    def _hessian_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return super()._hessian_mat_prod(view, mat) * (1 + (len(mat) > 3))


class RaisesForNone(WeightedRule):
    def normalisation(self, view: View) -> float:
        return super().normalisation(view) * view.batch_size / view.batch_size


class ReadsTheWeightOfNow(WeightedRule):
    def weight(self, view: View) -> Tensor:
        return view.call.module.weight[view.tensor_input(1)]


class SaysConvex(WeightedRule):
    def is_convex(self, view: View) -> bool:
        return True


class Saddle(WeightedLoss):
    """The second half of the classes has negative weights."""

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        terms = torch.where(label > 2, -1.0, 1.0).double() * x.square().sum(1)
        return terms.mean() if self.reduction == "mean" else terms.sum()


class SaddleRule(WeightedRule):
    module_types = (Saddle,)
    hessian_is_psd = False

    def weight(self, view: View) -> Tensor:
        return torch.where(view.tensor_input(1) > 2, -1.0, 1.0).to(view.dtype)

    def _sqrt_hessian(self, view: View) -> Tensor:
        raise UnsupportedError(f"{view.path} has negative weights.")


class SaysASaddleIsConvex(SaddleRule):
    def is_convex(self, view: View) -> bool:
        return True


def of_classes(rule: type[HessianLossRule]) -> LossCase:
    (loss,) = rule.module_types
    return LossCase(
        loss, lambda n: (torch.randn(n, 2), torch.randint(5, (n,))), rule=rule, sampled=False
    )


@pytest.mark.parametrize("rule", [WeightedRule, SaysConvex, SaddleRule])
def test_right_loss_rules_pass(rule: type[HessianLossRule]) -> None:
    """Also without a reduction ``"none"``, and for a loss whose Hessian has both signs."""
    assert not faults(of_classes(rule))


@pytest.mark.parametrize(
    ("rule", "check", "said"),
    [
        (OneClassIsWrong, "other_inputs", "N = 5, and other inputs"),
        (WrongForManyColumns, "other_inputs", "V = 7"),
        (RaisesForNone, "other_inputs", "ZeroDivisionError.* N = 0"),
        (ReadsTheWeightOfNow, "leaves_arguments_alone", "The module was changed"),
        (SaysASaddleIsConvex, "hessian_is_psd", "is_convex is declared"),
    ],
)
def test_a_loss_rule_that_is_wrong_for_some_inputs_is_found(
    rule: type[HessianLossRule], check: str, said: str
) -> None:
    results = check_case(of_classes(rule))
    (first,) = [result for result in results if result.status == "failed"][:1]
    assert first.check == check
    assert re.search(said, first.message), first.message


class Minus(nn.MSELoss):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -super().forward(x, y)


class Cosh(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        terms = (input - target).cosh()
        return terms if self.reduction == "none" else getattr(terms, self.reduction)()


class DetachedCurvature(MSELossRule):
    module_types = (Cosh,)

    def curvature(self, view: View) -> Tensor:
        return (view.input - view.tensor_input(1)).cosh().detach()

    def sampled_gradient(self, view: View, samples: int) -> Tensor:
        return super(MSELossRule, self).sampled_gradient(view, samples)


class SaysMinusIsConvex(MSELossRule):
    module_types = (Minus,)


class OfTheSum(nn.MSELoss):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + x.sum() ** 2


class SaysSamplesAreSeparate(MSELossRule):
    module_types = (OfTheSum,)


@pytest.mark.parametrize(
    ("rule", "check"),
    [
        (TwiceTheSamples, "sqrt_hessian_sampled_sum"),
        (SharesTheDraws, "sqrt_hessian_sampled_sum"),
        (SaysMinusIsConvex, "hessian_is_psd"),
        (SaysSamplesAreSeparate, "samples_are_separate"),
        (UnreducedTwice, "unreduced"),
        (DrawsNumbers, "leaves_arguments_alone"),
        (KeepsState, "leaves_arguments_alone"),
        (DetachedCurvature, "started_extensions_sum"),
    ],
)
def test_a_loss_rule_that_is_wrong_is_found(rule: type[MSELossRule], check: str) -> None:
    (loss,) = rule.module_types
    case = LossCase(loss, lambda n: (torch.randn(n, 2), torch.randn(n, 2)), rule=rule)
    assert check in {result.check for result in check_case(case) if result.status == "failed"}


def test_without_an_oracle_values_must_be_finite() -> None:
    class Infinite(Largest):
        def read(self, product: SampleProduct) -> Tensor:
            return super().read(product) / 0

    results = check_case(ExtensionCase(Infinite), ["mean"])
    assert "finite" in results[0].message


def test_without_an_oracle_a_check_fails() -> None:
    """Otherwise, whoever forgets it would see that all checks pass."""
    failed = {r.check: r.message for r in check_case(ExtensionCase(Largest)) if not r.ok}
    assert [*failed] == ["quantity"]
    assert "give ExtensionCase a Quantity" in failed["quantity"]


def test_a_misspelt_method_is_named() -> None:
    class Slip(FirstOrderExtension):
        savefield = "slip"

        def raed(self, product: SampleProduct) -> Tensor:
            return product.samples

    with pytest.raises(PluginError, match="not implement read: did you mean it by 'raed'"):
        check_case(ExtensionCase(Slip, QUANTITY))


def test_the_table_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from backpack_core.testing import quantities

    monkeypatch.setattr(quantities, "_quantities", dict(quantities._quantities))
    register_quantity("largest", QUANTITY)
    assert quantity_of(Largest()) is QUANTITY
    with pytest.raises(UsageError, match="already"):
        register_quantity("largest", QUANTITY)


def test_an_observed_value_must_be_a_tensor() -> None:
    quantity = Quantity(lambda reference, name: torch.zeros(()))
    with pytest.raises(UsageError, match="is not a tensor"):
        quantity.observe("text", None, "weight")  # type: ignore[arg-type]
