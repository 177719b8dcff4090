"""What is checked by values is said in passes that are measured; in others, it shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core import Extension, backpack, extend
from backpack_core.errors import RangeWarning, UnsupportedError, UsageError
from backpack_core.extensions import (
    EKFAC,
    KFAC,
    BatchL2Grad,
    ClippedSumGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    DiagHMP,
)
from backpack_secondorder import operators
from tests.cases import mlp
from tests.oracle import assert_close
from tests.waits import Reads


def _pass(
    model: nn.Module, extension: Extension, lossfunc: nn.Module, factor: float = 1.0, **options: Any
) -> None:
    loss = extend(lossfunc)(extend(model)(torch.randn(4, 3)), torch.tensor([0, 1, 2, 1]))
    with backpack(extension, **options):
        (factor * loss).backward()


class Checkpointed(nn.Module):
    """A model without plans."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.net, x, use_reentrant=False)
        return result


NOT_POSITIVE: dict[str, Callable[[], tuple[nn.Module, float]]] = {
    "a class weight": lambda: (nn.CrossEntropyLoss(torch.tensor([1.0, -2.0, 1.0])), 1.0),
    "a factor": lambda: (nn.CrossEntropyLoss(), -1.0),
}


@pytest.mark.parametrize("kind", [DiagGGNExact, DiagGGNMC])
@pytest.mark.parametrize("name", NOT_POSITIVE)
def test_a_root_that_does_not_exist_is_not_a_number(name: str, kind: type[Any]) -> None:
    model, (lossfunc, factor) = mlp(), NOT_POSITIVE[name]()
    with pytest.raises(UnsupportedError, match="negative"):
        _pass(model, kind(), lossfunc, factor)
    _pass(model, kind(), lossfunc, factor, check="never")
    for p in model.parameters():
        assert getattr(p, kind.savefield).isnan().all()


def test_a_factor_whose_sign_changes() -> None:
    """Of a trusted structure, which does not tell numbers apart."""
    model = mlp()
    for factor in (1.0, 2.0):
        _pass(model, DiagGGNExact(), nn.CrossEntropyLoss(), factor)
    _pass(model, DiagGGNExact(), nn.CrossEntropyLoss(), -1.0)  # the third one is not measured
    assert all(p.diag_ggn_exact.isnan().all() for p in model.parameters())
    with pytest.raises(UnsupportedError, match="negative"):
        _pass(model, DiagGGNExact(), nn.CrossEntropyLoss(), -1.0)


@pytest.mark.parametrize("is_planned", [True, False])
def test_an_extension_that_is_new_to_a_trusted_structure(is_planned: bool) -> None:
    """What it refuses by values is refused until one of its own passes went well."""
    model = mlp() if is_planned else Checkpointed(mlp())
    for _ in range(5):
        _pass(model, DiagHessian(), nn.CrossEntropyLoss(), -1.0)
    for _ in range(2):  # the passes 6 and 7 of this structure, which are not measured
        with pytest.raises(UnsupportedError, match="negative"):
            _pass(model, DiagGGNExact(), nn.CrossEntropyLoss(), -1.0)


@pytest.mark.parametrize("name", NOT_POSITIVE)
def test_the_hessian_needs_no_root(name: str) -> None:
    """Where there is none it goes another way, in every pass."""
    model, (lossfunc, factor), found = mlp(), NOT_POSITIVE[name](), []
    for check in ("first", "never"):
        torch.manual_seed(0)
        _pass(model, DiagHessian(), lossfunc, factor, check=check)
        found.append([p.diag_h for p in model.parameters()])
    for first, second in zip(*found, strict=True):
        assert_close(first, second)


def test_squares_out_of_range_are_warned_of_in_passes_that_are_measured() -> None:
    model, caught = mlp().float(), []
    torch.set_default_dtype(torch.float32)
    for check in ("never", "first"):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            _pass(model, BatchL2Grad(), nn.CrossEntropyLoss(), 1e30, check=check)
        caught.append([issubclass(warning.category, RangeWarning) for warning in found])
        assert model[0].weight.batch_l2.isinf().all()
    assert caught == [[], [True]]


@pytest.mark.parametrize("ignored", [0, 1])
def test_normalisers_of_several_losses(ignored: int) -> None:
    """Both count the targets that are not ignored; where they differ, no bound is meant.

    On the host every pass looks, since nothing is waited for there.
    """
    model, first, second = extend(mlp()), *(extend(nn.CrossEntropyLoss()) for _ in range(2))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    other, found = y.clone(), []
    other[:ignored] = -100
    for check in ("never", "first"):
        out = model(x)
        loss = first(out, y) + second(out, other)
        with backpack(ClippedSumGrad(0.1), check=check):
            if ignored and (check == "first" or x.is_cpu):
                with pytest.raises(UsageError, match="divide by 3 and by 4"):
                    loss.backward()
                continue
            with Reads() as reads:
                loss.backward()
        found.append([p.grad_clipped for p in model.parameters()])
        assert check == "first" or x.is_cpu or not reads.found
    if ignored:
        assert all(clipped.isnan().all() for one in found for clipped in one)
    else:
        for ours, reference in zip(*found, strict=True):
            assert_close(ours, reference)


def test_eigenvectors_of_what_is_not_finite() -> None:
    model = mlp()
    with pytest.raises(UsageError, match="not finite"):
        _pass(model, EKFAC(), nn.CrossEntropyLoss(), float("inf"))
    _pass(model, EKFAC(), nn.CrossEntropyLoss(), float("inf"), check="never")
    for p in model.parameters():
        assert p.ekfac.values.isnan().all()
        assert all(vectors.isnan().all() for vectors in p.ekfac.vectors[:1])


def test_factors_that_are_not_finite_are_refused_when_they_are_used() -> None:
    model = mlp()
    _pass(model, KFAC(), nn.CrossEntropyLoss(), float("inf"), check="never")
    with pytest.raises(UsageError, match="not finite"):
        model[0].weight.kfac.eigenbasis()


@pytest.mark.parametrize("check", ["first", "never"])
def test_products_that_vmap_gets_wrong(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed one by one, also in later passes, in which nobody looks."""
    looks = list[bool]()

    def found(answer: bool) -> list[Tensor]:
        def look(*given: Any) -> bool:
            looks.append(answer)
            return answer

        model = mlp()
        monkeypatch.setattr(operators, "_agreed", {})
        monkeypatch.setattr(operators, "agree", look)
        for _ in range(3):  # the third is not measured
            looks.clear()
            _pass(model, DiagHMP(), nn.CrossEntropyLoss(), check=check)
        return [p.diag_hmp for p in model.parameters()]

    def one_by_one(self: Any, parameter: Tensor, vectors: Tensor) -> Tensor:
        return 2 * multiply(self, parameter, vectors)  # so that it shows which way was gone

    torch.manual_seed(0)
    right = found(True)
    assert not looks
    multiply = operators.Operator.multiply
    monkeypatch.setattr(operators.Operator, "multiply", one_by_one)
    torch.manual_seed(0)
    for ours, expected in zip(found(False), right, strict=True):
        assert_close(ours, 2 * expected)
    assert not looks
