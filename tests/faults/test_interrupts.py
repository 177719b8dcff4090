"""Forward passes that end in an exception, among them those that Python does not call errors."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import BackpackError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from tests.cases import Problem, classification
from tests.faults.problems import KINDS, check

pytestmark = [
    pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning"),
    pytest.mark.filterwarnings("ignore::backpack_core.errors.UncoveredParameterWarning"),
]


class Inner(nn.Module):
    """Raises what it is told to, before or after its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.randn(3))
        self.before: BaseException | None = None
        self.after: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            raise self.before
        hidden: Tensor = self.linear(x * self.scale)
        if self.after is not None:
            raise self.after
        return hidden


class Outer(nn.Module):
    """Owns a weight, and has an inner module and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.inner = Inner()
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.inner(F.linear(x, self.weight)))
        return result


KINDS_OF_EXCEPTIONS: list[type[BaseException]] = [
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    asyncio.CancelledError,
    RuntimeError,
]
PLACES = ("before", "after", "pre_hook", "hook")


def interrupt(model: Outer, exception: type[BaseException], place: str, x: Tensor) -> None:
    """A forward pass that ends in an exception somewhere inside."""
    handle = None
    if place in ("before", "after"):
        setattr(model.inner, place, exception())
    else:

        def fail(*_: Any) -> None:
            raise exception

        layer = model.inner.linear
        register = (
            layer.register_forward_pre_hook if place == "pre_hook" else layer.register_forward_hook
        )
        handle = register(fail)
    with pytest.raises(exception):
        model(x)
    model.inner.before = model.inner.after = None
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize(
    ("exception", "place"),
    [(kind, "before") for kind in KINDS_OF_EXCEPTIONS]
    + [(KeyboardInterrupt, place) for place in PLACES[1:]],
)
def test_nothing_stays_alive(exception: type[BaseException], place: str) -> None:
    model = extend(Outer())
    references: list[Any] = []
    for _ in range(3):
        leaf = torch.randn(3, 3, requires_grad=True)
        x = leaf * 2.0
        references += [weakref.ref(leaf), weakref.ref(x)]
        interrupt(model, exception, place, x)
        del leaf, x
    references.append(weakref.ref(model))
    del model
    gc.collect()
    assert [reference() for reference in references] == [None] * 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exception", KINDS_OF_EXCEPTIONS)
def test_next_pass_is_right(exception: type[BaseException], kind: str) -> None:
    problem = classification(Outer(), (3,))
    model: Any = extend(problem.model)
    for place in PLACES:
        interrupt(model, exception, place, problem.inputs[0])
    check(problem, kind)


def _also_outside(model: Outer, x: Tensor) -> Tensor:
    return F.linear(model(x), model.weight)


def _only_outside(model: Outer, x: Tensor) -> Tensor:
    return F.linear(model.last(x), model.weight)


def _inner_outside(model: Outer, x: Tensor) -> Tensor:
    return model(x) * model.inner.scale


def _weight_of_a_layer(model: Outer, x: Tensor) -> Tensor:
    return F.linear(model(x), model.inner.linear.weight)


Use = Callable[[Outer, Tensor], Tensor]
USES: list[Use] = [_also_outside, _only_outside, _inner_outside, _weight_of_a_layer]


def outcome(problem: Problem, use: Use, extension: Any) -> Any:
    """What a pass stores, or the error it raises."""
    model: Any = extend(problem.model)
    lossfunc = extend(problem.lossfunc)
    loss = lossfunc(use(model, problem.inputs[0]), problem.target)
    try:
        with backpack(extension):
            loss.backward()
    except BackpackError as error:
        return type(error), str(error)
    return [getattr(p, extension.savefield, None) for p in model.parameters()]


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__.strip("_"))
@pytest.mark.parametrize("exception", KINDS_OF_EXCEPTIONS)
def test_use_of_a_parameter_outside(
    exception: type[BaseException], use: Use, extension: Any
) -> None:
    """As in a process in which nothing was interrupted."""
    torch.manual_seed(1)
    fresh = outcome(classification(Outer(), (3,)), use, extension())
    torch.manual_seed(1)
    problem = classification(Outer(), (3,))
    model: Any = extend(problem.model)
    for place in PLACES:
        interrupt(model, exception, place, problem.inputs[0])
    found = outcome(problem, use, extension())
    if isinstance(fresh, tuple):
        assert found == fresh
        return
    assert isinstance(found, list)
    for ours, expected in zip(found, fresh, strict=True):
        assert (ours is None) == (expected is None)
        assert ours is None or torch.equal(ours, expected)
