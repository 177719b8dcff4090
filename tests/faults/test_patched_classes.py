"""Methods of modules, or functions that they call, are replaced between passes: no rule holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backpack_capture import capture
from backpack_core import backpack, extend
from backpack_core.errors import BackpackError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.plugins.registry import registry
from backpack_products import sameness

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


@pytest.fixture(autouse=True)
def _rules_are_resolved_again() -> Iterator[None]:
    """Before another test counts passes, of which the first would resolve them."""
    yield
    registry.look()


def _squared(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight**2, layer.bias)


def _squared_convolution(
    layer: nn.Conv1d, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    return F.conv1d(x, weight**2, bias)


def _squared_map(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, plain: Any = F.linear
) -> Tensor:
    return plain(x, weight**2, bias)  # type: ignore[no-any-return]


def _sine(x: Tensor, **_: Any) -> Tensor:
    return x.sin()


class _Line(nn.Linear):
    """A class that uses its parent's rule."""


class _Filter(nn.Conv1d):
    """Another one."""


CASES: list[tuple[Any, str, Any, Any]] = [
    (nn.Linear, "forward", _squared, lambda: nn.Linear(3, 2)),
    (_Line, "forward", _squared, lambda: _Line(3, 2)),
    (nn.Conv1d, "_conv_forward", _squared_convolution, lambda: nn.Conv1d(1, 2, 2)),
    (_Filter, "_conv_forward", _squared_convolution, lambda: _Filter(1, 2, 2)),
    (F, "linear", _squared_map, lambda: nn.Linear(3, 2)),
    (F, "linear", _squared_map, lambda: _Line(3, 2)),
    (nn.modules.linear, "F", SimpleNamespace(linear=_squared_map), lambda: nn.Linear(3, 2)),
    (F, "gelu", _sine, lambda: nn.Sequential(nn.Linear(3, 2), nn.GELU())),
    (torch, "tanh", _sine, lambda: nn.Linear(3, 2)),
    (torch, "relu", _sine, lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU())),
]
PATCHES = pytest.mark.parametrize(
    ("kind", "method", "function", "make"),
    [pytest.param(*case, id=f"{case[0].__name__}.{case[1]}") for case in CASES],
)


def _net(make: Any) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    layer = make()
    shape = (4, 1, 3) if isinstance(layer, nn.Conv1d) else (4, 3)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    x, y = torch.rand(shape), torch.randint(2, (4,))
    model(x)
    return extend(model), extend(nn.CrossEntropyLoss()), x, y


def _check(model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> None:
    """Compare individual gradients, and the diagonal of the GGN, with plain autograd."""
    for name, parameter in model.named_parameters():
        rows = [
            torch.autograd.grad(lossfunc(model(a[None]), b[None]) / len(x), parameter)[0]
            for a, b in zip(x, y, strict=True)
        ]
        torch.testing.assert_close(parameter.grad_batch, torch.stack(rows), msg=name)
        if "diag_ggn_exact" not in parameter.__dict__:
            continue
        diagonal = torch.zeros_like(parameter)
        for a in x:
            output = model(a[None]).flatten()
            p = output.detach().softmax(0)
            jacobian = torch.stack(
                [torch.autograd.grad(o, parameter, retain_graph=True)[0] for o in output]
            )
            mean = torch.tensordot(p, jacobian, 1)
            diagonal += torch.tensordot(p, jacobian**2, 1) - mean**2
        torch.testing.assert_close(parameter.diag_ggn_exact, diagonal / len(x), msg=name)


@PATCHES
@pytest.mark.parametrize("passes", [1, 5, 12])
def test_a_patched_method_is_differentiated(
    kind: Any, method: str, function: Any, make: Any, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the next pass is measured, goes by a plan, or would have repeated a recording."""
    model, lossfunc, x, y = _net(make)

    def step() -> None:
        with backpack(BatchGrad(), DiagGGNExact()):
            lossfunc(model(x), y).backward()

    for _ in range(passes):
        step()
    with monkeypatch.context() as patched:
        patched.setattr(kind, method, function)
        step()
        _check(model, lossfunc, x, y)
    step()
    _check(model, lossfunc, x, y)


@PATCHES
def test_a_captured_step_sees_a_patched_method(
    kind: Any, method: str, function: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lossfunc, x, y = _net(make)
    step = capture(lambda x, y: lossfunc(model(x), y), model, lossfunc, BatchGrad())
    for _ in range(8):
        step(x, y)
    assert any(
        form.graph and form.graph.replays for forms in step._forms.values() for form in forms
    )
    monkeypatch.setattr(kind, method, function)
    step(x, y)
    _check(model, lossfunc, x, y)


class _Doubling(TorchFunctionMode):
    """Has ``F.linear`` compute with other weights."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.linear:
            args = args[0], args[1] * 2, *args[2:]
        return function(*args, **(kwargs or {}))


class _Squared(nn.Parameter):
    """A weight that ``F.linear`` squares."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.linear:
                args = args[0], args[1] ** 2, *args[2:]
            return function(*args, **(kwargs or {}))


def test_a_class_with_an_unrelated_attribute_is_compared_name_by_name_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = sameness.Watched(_Line, ["forward", "extra_repr"])
    monkeypatch.setattr(_Line, "unrelated", 1, raising=False)
    assert not watched.is_changed()
    monkeypatch.setattr(sameness, "_attribute", None)
    assert not watched.is_changed()


@pytest.mark.parametrize("passes", [1, 2, 4, 6, 12])
@pytest.mark.parametrize("kind", [_Doubling, _Squared])
def test_operations_that_a_mode_or_a_class_of_weights_replaces(kind: Any, passes: int) -> None:
    """No plan of other passes is taken, and the first such pass is measured: it cannot be right."""
    model, lossfunc, x, y = _net(lambda: nn.Linear(3, 2))
    layer: Any = model[0]  # type: ignore[index]

    def step(mode: Any = None) -> None:
        with mode or nullcontext():
            loss = lossfunc(model(x), y)
        with backpack(BatchGrad(), DiagGGNExact()):
            loss.backward()

    for _ in range(passes):
        step()
    is_mode, weight = not issubclass(kind, Tensor), layer.weight
    layer.weight = weight if is_mode else kind(weight.detach())
    with pytest.raises(BackpackError):
        step(kind() if is_mode else None)
    layer.weight = weight
    step()
    _check(model, lossfunc, x, y)
