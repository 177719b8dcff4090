"""Modules that compute something other than the class they descend from."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrizations, parametrize

from backpack_core import backpack, extend
from tests.cases import Net, Problem, classification, mlp
from tests.faults.problems import KINDS, check, expect

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


# Subclasses that override a part of the forward pass.


class Standardised(nn.Conv2d):
    """Weight standardisation."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        mean = weight.mean((1, 2, 3), keepdim=True)
        deviation = weight.std((1, 2, 3), keepdim=True) + 1e-5
        return super()._conv_forward(x, (weight - mean) / deviation, bias)


class Doubled(nn.Conv2d):
    """Twice a convolution."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super()._conv_forward(x, weight, bias)


class Squared(nn.Conv2d):
    """A convolution, and a nonlinearity."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight, bias).square()


class Causal(nn.Conv1d):
    """Padded on one side."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(F.pad(x, (1, 0)), weight, bias)


class Masked(nn.Conv1d):
    """The last tap is off."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight * torch.tensor([1.0, 0.0]), bias)


class Renamed(nn.Conv2d):
    """The same map under another name."""


class Wide(nn.ConvTranspose1d):
    """One more element at the end."""

    def _output_padding(self, *args: Any, **kwargs: Any) -> list[int]:
        return [1]


class Twice(nn.Linear):
    """Overrides the forward pass itself."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Called(nn.Linear):
    """Overrides the call."""

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = super().__call__(x)
        return result.sin()


class SquaredWeight(nn.Linear):
    """The weight is a function of a parameter of another name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.root = self._parameters.pop("weight")

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "root" in self.__dict__["_parameters"]:
            return super().__getattr__("root") ** 2
        return super().__getattr__(name)


def _replaced_forward() -> nn.Linear:
    """The instance has a forward pass of its own."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.weight, self.bias)

    layer = nn.Linear(4, 4)
    layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]
    return layer


def _replaced_convolution() -> nn.Conv2d:
    def convolve(self: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight.tanh(), bias)

    layer = nn.Conv2d(2, 2, 2)
    layer._conv_forward = types.MethodType(convolve, layer)  # type: ignore[method-assign]
    return layer


Layer = tuple[Callable[[], nn.Module], tuple[int, ...]]
IMAGE, SIGNAL, VECTOR = (2, 3, 3), (2, 4), (4,)
LAYERS: dict[str, Layer] = {
    "standardised": (lambda: Standardised(2, 2, 2), IMAGE),
    "standardised_groups": (lambda: Standardised(2, 4, 2, groups=2, bias=False), IMAGE),
    "doubled": (lambda: Doubled(2, 2, 2), IMAGE),
    "squared": (lambda: Squared(2, 2, 2), IMAGE),
    "causal": (lambda: Causal(2, 2, 2), SIGNAL),
    "masked": (lambda: Masked(2, 2, 2), SIGNAL),
    "replaced_convolution": (_replaced_convolution, IMAGE),
    "renamed": (lambda: Renamed(2, 2, 2), IMAGE),
    "wide": (lambda: Wide(2, 2, 2, stride=2), SIGNAL),
    "twice": (lambda: Twice(4, 4), VECTOR),
    "called": (lambda: Called(4, 4), VECTOR),
    "squared_weight": (lambda: SquaredWeight(4, 4), VECTOR),
    "replaced_forward": (_replaced_forward, VECTOR),
}


def around(layer: nn.Module, shape: tuple[int, ...]) -> nn.Sequential:
    """A layer before, and a linear layer behind."""
    kind: Any = {1: nn.Linear, 2: nn.Conv1d, 3: nn.Conv2d}[len(shape)]
    first = kind(shape[0], shape[0]) if len(shape) == 1 else kind(shape[0], shape[0], 1)
    features = layer(torch.randn(1, *shape)).numel()
    return nn.Sequential(first, nn.Tanh(), layer, nn.Flatten(), nn.Linear(features, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_subclasses(name: str, kind: str) -> None:
    make, shape = LAYERS[name]
    check(classification(around(make(), shape), shape), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 1])
def test_several_of_one_class(index: int, kind: str) -> None:
    """Only one of two convolutions computes something else."""
    layers: list[nn.Module] = [nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Conv2d(2, 2, 2)]
    layers[2 * index] = Standardised(2, 2, 2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2, 3))
    check(classification(model, IMAGE), kind)


# Hooks of torch for all modules.


def _doubled(*kinds: type[nn.Module]) -> Callable[..., Tensor | None]:
    return lambda module, _, output: 2 * output if isinstance(module, kinds) else None


def _bent(*kinds: type[nn.Module]) -> Callable[..., Tensor | None]:
    return lambda module, _, output: output.sin() if isinstance(module, kinds) else None


def _doubled_in_place(*kinds: type[nn.Module]) -> Callable[..., Tensor | None]:
    return lambda module, _, output: output.mul_(2.0) if isinstance(module, kinds) else None


def _bent_inputs(*kinds: type[nn.Module]) -> Callable[..., Any]:
    return lambda module, args: (args[0].sin(),) if isinstance(module, kinds) else None


GLOBAL: dict[str, tuple[Any, Callable[..., Any]]] = {
    "linear": (hooks.register_module_forward_hook, _doubled(nn.Linear)),
    "linear_bent": (hooks.register_module_forward_hook, _bent(nn.Linear)),
    "linear_in_place": (hooks.register_module_forward_hook, _doubled_in_place(nn.Linear)),
    "activation": (hooks.register_module_forward_hook, _doubled(nn.Tanh)),
    "activation_bent": (hooks.register_module_forward_hook, _bent(nn.Tanh)),
    "own": (hooks.register_module_forward_hook, _bent(Net)),
    "all": (hooks.register_module_forward_hook, _doubled(nn.Linear, nn.Tanh, Net)),
    "container": (hooks.register_module_forward_hook, _bent(nn.Sequential)),
    "loss": (hooks.register_module_forward_hook, _doubled(nn.CrossEntropyLoss)),
    "nothing": (hooks.register_module_forward_hook, lambda *_: None),
    "inputs": (hooks.register_module_forward_pre_hook, _bent_inputs(nn.Linear, nn.Tanh)),
}


@contextmanager
def installed(name: str) -> Iterator[None]:
    """A hook for all modules of the process."""
    register, hook = GLOBAL[name]
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def _mixed() -> nn.Sequential:
    own = Net(lambda net, x: x * net.scale, scale=nn.Parameter(torch.randn(4)))
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), own, nn.Linear(4, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GLOBAL)
def test_hooks_for_all_modules(name: str, kind: str) -> None:
    problem = classification(_mixed(), (3,))
    with installed(name):
        check(problem, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["all", "loss", "inputs"])
def test_hooks_that_come_after_extend(name: str, kind: str) -> None:
    problem = classification(_mixed(), (3,))
    extend(problem.model), extend(problem.lossfunc)
    with installed(name):
        check(problem, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["linear", "activation_bent"])
def test_hook_that_is_gone_at_the_backward_pass(name: str, kind: str) -> None:
    problem = classification(mlp(), (3,))
    with installed(name):
        expectation = expect(problem.expected, kind)
        loss = problem.loss()
    with backpack(*expectation.extensions):
        loss.backward()
    expectation.compare(problem.parameters)


@pytest.mark.parametrize("is_raised", [False, True])
def test_nothing_stays_among_hooks_of_all_modules(is_raised: bool) -> None:
    """While others have some there, ours is the first; what remains is theirs."""
    kept: list[Any] = []
    table: Any = hooks._global_forward_hooks

    def forward(net: Net, x: Tensor) -> Tensor:
        assert len(table) == 2
        assert [*table.values()][1] is look
        if is_raised:
            raise KeyError
        return x * net.scale

    def look(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        kept.append(kwargs)

    model = extend(Net(forward, scale=nn.Parameter(torch.ones(3))))
    handle = hooks.register_module_forward_hook(look, with_kwargs=True)
    with pytest.raises(KeyError) if is_raised else nullcontext():
        model(torch.ones(2, 3))
    assert [*table.values()] == [look]
    handle.remove()
    assert not table
    # Torch forgets its own there, and takes it for a hook of all modules when it compiles.
    assert [*hooks._global_forward_hooks_with_kwargs] == [handle.id]
    del hooks._global_forward_hooks_with_kwargs[handle.id]
    assert len(kept) == (not is_raised)


# Weights that are functions of other parameters.


class Bounded(nn.Module):
    """Every entry between -1 and 1."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


class LowRank(nn.Module):
    """A correction with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(4, 1))
        self.right = nn.Parameter(torch.randn(1, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


def _with(parametrization: Callable[[], nn.Module]) -> Callable[[nn.Module], object]:
    return lambda layer: parametrize.register_parametrization(layer, "weight", parametrization())


def _pruned(layer: nn.Module) -> None:
    layer.register_parameter("original", layer._parameters.pop("weight"))
    layer.register_buffer("mask", (torch.rand(4, 4) > 0.5).to(torch.float64))

    def mask(module: Any, _: Any) -> None:
        module.weight = module.original * module.mask

    layer.register_forward_pre_hook(mask)


PARAMETRIZED: dict[str, Callable[[Any], object]] = {
    "bounded": _with(Bounded),
    "bounded_twice": lambda layer: (_with(Bounded)(layer), _with(Bounded)(layer)),
    "bounded_bias": lambda layer: parametrize.register_parametrization(layer, "bias", Bounded()),
    "low_rank": _with(LowRank),
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer).eval(),
    "pruned": _pruned,
}


def parametrized(name: str, frozen: bool = False) -> Problem:
    """A parametrized linear layer between two others."""
    layer = nn.Linear(4, 4)
    PARAMETRIZED[name](layer)
    for parameter_name, parameter in layer.named_parameters():
        parameter.requires_grad_(not (frozen and "original" in parameter_name))
    return classification(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 3)), (3,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized(name: str, kind: str) -> None:
    check(parametrized(name), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_and_frozen(name: str, kind: str) -> None:
    """The parametrized weight itself is a constant."""
    check(parametrized(name, frozen=True), kind)
