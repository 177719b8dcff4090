"""A result is of the last pass, or there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import backpack, extend
from backpack_core.extensions import (
    BatchGrad,
    ClippedSumGrad,
    DiagGGNExact,
    SumGradSquared,
    Variance,
)
from tests.cases import classification, mlp

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


FIELDS = {"grad_batch": BatchGrad, "diag_ggn_exact": DiagGGNExact, "grad_clipped": ClippedSumGrad}


AFTER = pytest.mark.parametrize("field", FIELDS)


def extension_of(field: str) -> Any:
    """The extension that stores under a name."""
    return FIELDS[field](1.0) if field == "grad_clipped" else FIELDS[field]()


def has(module: nn.Module, field: str) -> list[bool]:
    """Which parameters have the field."""
    return [hasattr(p, field) for p in module.parameters()]


class Heads(nn.Module):
    """A body and two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, side: str) -> Tensor:
        head = self.left if side == "left" else self.right
        result: Tensor = head(torch.tanh(self.body(x)))
        return result


class TwoHeads:
    """An extended model, a loss, and data."""

    def __init__(self) -> None:
        self.model = extend(Heads())
        self.lossfunc = extend(nn.CrossEntropyLoss())

    def loss(self, side: str) -> Tensor:
        """A forward pass on fresh data."""
        output = self.model(torch.randn(3, 3), side)
        result: Tensor = self.lossfunc(output, torch.randint(0, 3, (3,)))
        return result

    def run(self, side: str, *extensions: Any, **options: Any) -> None:
        """A forward and a backward pass."""
        loss = self.loss(side)
        with backpack(*extensions, **options):
            loss.backward()


@AFTER
def test_branch_that_is_not_used(field: str) -> None:
    heads = TwoHeads()
    heads.run("left", extension_of(field))
    heads.run("right", extension_of(field))
    assert has(heads.model.body, field) + has(heads.model.right, field) == [True] * 4
    assert has(heads.model.left, field) == [False] * 2


@AFTER
def test_two_passes_under_one_block(field: str) -> None:
    heads = TwoHeads()
    left, right = heads.loss("left"), heads.loss("right")
    with backpack(extension_of(field)):
        left.backward()
        assert has(heads.model.left, field) == [True] * 2
        right.backward()
    assert has(heads.model.left, field) == [False] * 2
    assert has(heads.model.right, field) == [True] * 2


@AFTER
def test_parameter_that_was_frozen(field: str) -> None:
    problem = classification(mlp(), (3,))
    problem.run(extension_of(field))
    problem.model[0].weight.requires_grad_(False)  # type: ignore[index]
    problem.run(extension_of(field))
    assert has(problem.model, field) == [False, True, True, True]


@AFTER
def test_module_that_was_frozen(field: str) -> None:
    problem = classification(mlp(), (3,))
    problem.run(extension_of(field))
    problem.model[0].requires_grad_(False)  # type: ignore[index]
    problem.run(extension_of(field))
    assert has(problem.model, field) == [False, False, True, True]


@AFTER
def test_pass_that_ends_early(field: str) -> None:
    problem = classification(mlp(), (3,))
    problem.run(extension_of(field))
    loss = problem.loss()
    with backpack(extension_of(field)):
        loss.backward(inputs=list(problem.model[2].parameters()))  # type: ignore[index]
    assert has(problem.model, field) == [False, False, True, True]


@AFTER
def test_pass_that_fails(field: str) -> None:
    def fail(module: nn.Module) -> None:
        if isinstance(module, nn.Tanh):
            raise RuntimeError("stop")

    problem = classification(mlp(), (3,))
    problem.run(extension_of(field))
    loss = problem.loss()
    with (
        pytest.raises(RuntimeError, match="stop"),
        backpack(extension_of(field), extension_hook=fail),
    ):
        loss.backward()
    assert has(problem.model[0], field) == [False, False]  # type: ignore[index]


@AFTER
def test_name_of_another_extension(field: str) -> None:
    """A savefield is cleared whoever filled it."""
    heads = TwoHeads()
    heads.run("left", SumGradSquared(savefield=field))
    heads.run("right", extension_of(field))
    assert has(heads.model.left, field) == [False] * 2


def test_fields_of_other_extensions_stay() -> None:
    heads = TwoHeads()
    heads.run("left", BatchGrad(), BatchGrad(savefield="mine"))
    kept = [(p.grad_batch, p.mine) for p in heads.model.left.parameters()]
    heads.run("right", DiagGGNExact(), BatchGrad())
    for p, (_, mine) in zip(heads.model.left.parameters(), kept, strict=True):
        assert p.mine is mine
        assert not hasattr(p, "grad_batch")


@AFTER
def test_passes_without_the_extension_remove_nothing(field: str) -> None:
    heads = TwoHeads()
    heads.run("left", extension_of(field))
    kept = [getattr(p, field) for p in heads.model.left.parameters()]
    heads.loss("right").backward()
    heads.run("right")
    heads.run("right", Variance())
    assert all(
        getattr(p, field) is value
        for p, value in zip(heads.model.left.parameters(), kept, strict=True)
    )


@AFTER
def test_other_models_are_not_touched(field: str) -> None:
    first, second = TwoHeads(), TwoHeads()
    first.run("left", extension_of(field))
    kept = {p: getattr(p, field) for p in first.model.parameters() if hasattr(p, field)}
    second.run("left", extension_of(field))
    second.run("right", extension_of(field))
    assert len(kept) == 4
    assert all(getattr(p, field) is value for p, value in kept.items())


@AFTER
def test_models_that_were_extended_one_by_one(field: str) -> None:
    """Parts of one module, of which each is a model for itself."""
    left, right = extend(nn.Linear(3, 3)), extend(nn.Linear(3, 3))
    lossfunc = extend(nn.CrossEntropyLoss())
    for part in (left, right):
        loss = lossfunc(part(torch.randn(3, 3)), torch.tensor([0, 1, 2]))
        with backpack(extension_of(field)):
            loss.backward()
    assert has(left, field) + has(right, field) == [True] * 4


@AFTER
@pytest.mark.parametrize("hook", ["extension_hook", "gradient_hook"])
def test_inner_passes_remove_nothing(hook: str, field: str) -> None:
    outer, inner = TwoHeads(), TwoHeads()
    inner.run("left", extension_of(field))
    kept = [getattr(p, field) for p in inner.model.left.parameters()]
    losses = [inner.loss("right")]

    def run(_: object) -> None:
        if losses:
            losses.pop().backward()

    options: dict[str, Any] = {}
    if hook == "extension_hook":
        options["extension_hook"] = run
    else:
        outer.model.body.weight.register_hook(run)
    outer.run("left", extension_of(field), **options)
    assert not losses
    assert has(outer.model.left, field) + has(outer.model.body, field) == [True] * 4
    assert has(inner.model.right, field) == [True] * 2
    for p, value in zip(inner.model.left.parameters(), kept, strict=True):
        assert getattr(p, field) is value


@AFTER
def test_inner_pass_of_the_same_model_removes_nothing(field: str) -> None:
    """What the outer pass stored before stays, where the inner one does not come by."""
    heads = TwoHeads()
    losses = [heads.loss("right")]

    def run(_: object) -> None:
        if losses:
            losses.pop().backward()

    heads.model.left.weight.register_hook(run)
    heads.run("left", extension_of(field))
    assert not losses
    assert has(heads.model.left, field) == [True] * 2
