"""What functions read by other names than those of variables and attributes in their code.

Constants of classes, modules of Python, words that are names, and what methods of installed classes
read are compared, too.
"""

from __future__ import annotations

import operator
import weakref
from array import array
from collections import ChainMap, UserDict
from collections.abc import Callable
from functools import partial
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_capture import capture
from backpack_core import extend
from backpack_core.extensions import BatchGrad
from tests.capture.twins import same


class Constants:
    scale = 1.0


class Derived(Constants):
    pass


class WithProperty(type):
    @property
    def scale(cls) -> float:
        return cls.number  # type: ignore[attr-defined,no-any-return]


class OfType(metaclass=WithProperty):
    number = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


MODULE = ModuleType("module_of_a_user")
exec("scale = 1.0\ndef scaled():\n    return scale", vars(MODULE))
DERIVED, SPACE, WORD, SLOTTED, TARGET = (
    Derived(),
    SimpleNamespace(scale=1.0),
    "scale",
    Slotted(),
    Derived(),
)
WEAK, TABLE, BYTES, ARRAY = weakref.ref(TARGET), {"scale": 1.0}, bytearray([1]), array("d", [1.0])
PROXY, CHAIN, USERS = MappingProxyType(TABLE), ChainMap({}, TABLE), UserDict(scale=1.0)
NORMAL = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
GLOBAL = 1.0


def _put(owner: Any, name: str = "scale") -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


# How a number is read, and how it is changed.
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "class": (lambda: Constants.scale, _put(Constants)),
    "parent": (lambda: DERIVED.scale, _put(Constants)),
    "metaclass": (lambda: OfType.scale, _put(OfType, "number")),
    "module": (lambda: MODULE.scale, _put(MODULE)),
    "function_of_a_module": (lambda: MODULE.scaled(), _put(MODULE)),
    "getattr": (lambda: getattr(SPACE, "scale"), _put(SPACE)),  # noqa: B009
    "word": (lambda: getattr(SPACE, WORD), _put(SPACE)),
    "vars": (lambda: vars(SPACE)["scale"], _put(SPACE)),
    "globals": (lambda: globals()["GLOBAL"], lambda value: globals().update(GLOBAL=value)),
    "attrgetter": (lambda: operator.attrgetter("scale")(SPACE), _put(SPACE)),
    "slots": (lambda: SLOTTED.scale, _put(SLOTTED)),
    "weak": (lambda: WEAK().scale, _put(TARGET)),  # type: ignore[union-attr]
    "proxy": (lambda: PROXY["scale"], lambda value: TABLE.update(scale=value)),
    "chain": (lambda: CHAIN["scale"], lambda value: TABLE.update(scale=value)),
    "dictionary": (lambda: USERS["scale"], lambda value: USERS.update(scale=value)),
    "bytes": (lambda: float(BYTES[0]), lambda value: BYTES.__setitem__(0, int(value))),
    "array": (lambda: ARRAY[0], lambda value: ARRAY.__setitem__(0, value)),
    "distribution": (
        lambda: NORMAL.cdf(torch.tensor(1.0)),
        lambda value: setattr(NORMAL, "scale", torch.tensor(value)),
    ),
    "covered": (lambda: abs(-1.0), lambda value: globals().update(abs=lambda number: value)),
}


class Scaled(nn.Module):
    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.read()  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["module", "step"])
@pytest.mark.parametrize("name", CASES)
def test_a_number_that_is_read_by_another_name(name: str, place: str) -> None:
    read, write = CASES[name]
    one: Callable[[], Any] = lambda: 1.0  # noqa: E731
    inner, outer = (read, one) if place == "module" else (one, read)
    model, lossfunc = extend(Scaled(inner)), extend(nn.CrossEntropyLoss())

    def function(x: Tensor, y: Tensor) -> Tensor:
        return lossfunc(model(x), y) * outer()  # type: ignore[no-any-return]

    step = capture(function, model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.randint(3, (5,))
    for _ in range(8):
        step(x, y)
    assert step.holds(x, y)
    write(3.0)
    try:
        assert not step.holds(x, y)
        same(step(x, y), function(x, y).detach())
    finally:
        write(1.0)
        globals().pop("abs", None)


class _OnlyOfInstances:
    def __init__(self, value: float, error: type[Exception]) -> None:
        self.value, self.error = value, error

    def __get__(self, instance: Any, owner: type) -> float:
        if instance is None:
            raise self.error("it has no value on the class")
        return self.value


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_descriptor_without_a_value_on_the_class(error: type[Exception]) -> None:
    class Net(Scaled):
        factor = _OnlyOfInstances(2.0, error)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.factor

    model, lossfunc = extend(Net(lambda: 1.0)), extend(nn.CrossEntropyLoss())

    def function(x: Tensor, y: Tensor) -> Tensor:
        return lossfunc(model(x), y)  # type: ignore[no-any-return]

    step = capture(function, model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.randint(3, (5,))
    for _ in range(8):
        same(step(x, y), function(x, y).detach())
    Net.factor = _OnlyOfInstances(3.0, error)
    same(step(x, y), function(x, y).detach())


class Weighted:
    def __init__(self, model: nn.Module, lossfunc: nn.Module) -> None:
        self.model, self.lossfunc, self.weight = model, lossfunc, 1.0

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.lossfunc(self.model(x), y) * self.weight  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["object", "partial"])
def test_a_step_that_is_no_function(kind: str) -> None:
    model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss())
    given: Any = Weighted(model, lossfunc)
    if kind == "partial":
        given = partial(lambda x, y, weight: lossfunc(model(x), y) * weight, weight=1.0)
    step = capture(given, model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.randint(3, (5,))
    for _ in range(8):
        step(x, y)
    assert step.holds(x, y)
    (given.keywords if kind == "partial" else vars(given))["weight"] = 3.0
    assert not step.holds(x, y)
    same(step(x, y), given(x, y).detach())


@pytest.mark.parametrize("read", [lambda: SPACE.scale, lambda: TABLE["scale"]])
def test_a_global_that_is_called_like_an_attribute(read: Callable[[], Any]) -> None:
    """As the variable of a loop in a script."""
    model, lossfunc = extend(Scaled(read)), extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    x, y = torch.rand(5, 4), torch.randint(3, (5,))
    try:
        for number in range(8):
            globals()["scale"] = number
            step(x, y)
        globals()["scale"] = 8
        assert step.holds(x, y)
    finally:
        del globals()["scale"]


def test_parameters_that_exchanged_their_attributes() -> None:
    """As ``torch.utils.swap_tensors`` and some wrappers do."""
    model, lossfunc = extend(nn.Linear(4, 3)), extend(nn.CrossEntropyLoss())
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    for _ in range(8):
        step(torch.rand(5, 4), torch.randint(3, (5,)))
    model.weight.__dict__, model.weight.grad = {}, None
    step(torch.rand(5, 4), torch.randint(3, (5,)))
    individual: Tensor = model.weight.grad_batch  # type: ignore[attr-defined]
    torch.testing.assert_close(individual.sum(0), model.weight.grad)
