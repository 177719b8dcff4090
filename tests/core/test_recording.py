"""What is noted of a call, and what of it is the same at every call of a module."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from backpack_core import View, backpack, extend, unextend
from backpack_core.errors import OverwrittenInputError
from backpack_core.extensions import BatchGrad
from backpack_core.plugins.registry import registry
from backpack_core.record.call import Call, edge_of, site_at
from backpack_core.testing import temporary_plugin
from backpack_operations.traits import traits_of
from backpack_products.parametric import ParametricRule
from tests.leftovers import live_calls


def call_of(output: Tensor) -> Call:
    edge = edge_of(output)
    assert edge is not None
    site = site_at(edge)
    assert site is not None
    return site.call


class Scaled(nn.Module):
    """Parameters, and plain attributes that its forward uses."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        vars(self).update(settings)

    def forward(self, x: Tensor) -> Tensor:
        factor: Any = vars(self).get("factor", vars(self).get("other", 1.0))
        result: Tensor = x * self.weight * factor
        return result


def check(model: nn.Module, x: Tensor, expected: Tensor) -> None:
    """Individual gradients of the sum of a model's output in its one parameter."""
    output = model(x)
    with backpack(BatchGrad(fail_mode="autodiff")):
        output.sum().backward()
    parameter: Any = next(model.parameters())
    torch.testing.assert_close(parameter.grad_batch, expected)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("before", [{"factor": 2.0}, {"factor": torch.tensor(2.0)}, {"other": 2.0}])
@pytest.mark.parametrize("after", [{"factor": 3.0}, {"factor": torch.tensor(3.0)}, {"other": 3.0}])
def test_attributes_change_between_calls(before: Any, after: Any) -> None:
    """Their values, their kinds, and their names, at one number of them."""
    x, model = torch.randn(4, 3), extend(Scaled(**before))
    check(model, x, 2 * x)
    for name in before:
        del vars(model)[name]
    vars(model).update(after)
    check(model, x, 3 * x)


def test_attributes_change_before_the_backward_pass() -> None:
    x, model = torch.randn(4, 3), extend(nn.Dropout(0.5))
    layer: Any = extend(nn.Linear(3, 3))
    for p in (0.25, 0.75):
        model.p = p
        output = model(layer(x))
        model.p = 0.5
        expected = torch.autograd.grad(output.sum(), layer.bias, retain_graph=True)[0]
        with backpack(BatchGrad()):
            output.sum().backward()
        torch.testing.assert_close(layer.bias.grad_batch.sum(0), expected)
        assert tuple(call_of(output).settings) == (("training", "p", "inplace"), (True, p, False))


def test_the_mode_changes_before_the_backward_pass() -> None:
    """A rule that asks the module is told the same as one that asks the view."""
    model, x = extend(nn.Dropout(0.5)), torch.randn(4, 3, requires_grad=True)
    for training in (True, False):
        model.train(training)
        output = model(2 * x)
        view = View(call_of(output))
        model.train(not training)
        assert view.module.training is view.training is training
        assert view.module.p == 0.5


def test_what_the_registry_says_is_not_kept_for_long() -> None:
    model, x = extend(nn.Linear(3, 3)), torch.randn(2, 3)
    known = call_of(model(x)).rule
    claims, registry.rules[nn.Linear] = registry.rules.pop(nn.Linear), []
    try:
        registry.add([], "nobody")  # type: ignore[arg-type]
        assert call_of(model(x)).rule is not known
    finally:
        registry.rules[nn.Linear] = claims
        registry.add([], "nobody")  # type: ignore[arg-type]
    assert call_of(model(x)).rule is known


def test_a_hook_before_the_forward_changes_its_input_in_place() -> None:
    """What the module gets is what counts. A hook that has just been put there is noticed first."""
    first: Any = extend(nn.Linear(3, 3))
    second: Any = extend(nn.Linear(3, 3))

    def double(_: nn.Module, args: Any) -> None:
        args[0].mul_(2)

    second.register_forward_pre_hook(double)

    def forward(x: Tensor) -> Tensor:
        return second(first(x) + 0)  # type: ignore[no-any-return]

    x = torch.randn(4, 3)
    with pytest.raises(OverwrittenInputError), backpack(BatchGrad()):
        forward(x).sum().backward()
    for _ in range(2):
        first.zero_grad()
        output = forward(x)
        with backpack(BatchGrad()):
            output.sum().backward()
        torch.testing.assert_close(first.weight.grad_batch.sum(0), first.weight.grad)
        torch.testing.assert_close(
            second.weight.grad_batch, torch.ones(4, 3, 1) * 2 * first(x).detach().unsqueeze(1)
        )


class Shifting(nn.Module):
    """Changes a constant that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x * self.weight * shift.add_(1)


class ShiftingRule(ParametricRule):
    module_types = (Shifting,)
    params = ("weight",)

    def _jac_t_mat_prod(self, view: View, mat: Tensor) -> Tensor:
        return mat * view.parameter("weight") * view.tensor_input(1)

    def _param_jac_t_mat_prod(self, view: View, name: str, mat: Tensor) -> Tensor:
        return mat * view.tensor_input(0) * view.tensor_input(1)


@pytest.mark.parametrize(("by_name", "has_hook"), [(False, False), (True, False), (True, True)])
def test_an_argument_that_the_module_changes_is_noticed(by_name: bool, has_hook: bool) -> None:
    """Versions are those of before the forward, whatever full backward hooks make of positions."""
    with temporary_plugin(ShiftingRule):
        _expect_it_is_noticed(by_name, has_hook)


def _expect_it_is_noticed(by_name: bool, has_hook: bool) -> None:
    model = extend(Shifting())
    if has_hook:
        model.register_full_backward_hook(lambda *_: None)
    x, shift = torch.randn(4, 3, requires_grad=True), torch.zeros(4, 3)
    output = model(x, shift=shift) if by_name else model(x, shift)
    with (
        pytest.raises(OverwrittenInputError, match="its input was changed in place"),
        backpack(BatchGrad()),
    ):
        output.sum().backward()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_after_a_forward_pass(duplicate: Any) -> None:
    model, x = extend(nn.Sequential(nn.Linear(3, 3))), torch.randn(4, 3)
    model(x)
    other: Any = duplicate(model)
    output = other(x)
    assert tuple(call_of(output).settings) == (
        ("training", "in_features", "out_features"),
        (True, 3, 3),
    )
    with backpack(BatchGrad()):
        output.sum().backward()
    torch.testing.assert_close(other[0].bias.grad_batch, torch.ones(4, 3))


def test_nothing_of_ours_stays_on_a_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    before = [set(vars(part)) for part in model.modules()]
    extend(model)(torch.randn(2, 3))
    unextend(model)
    assert [set(vars(part)) for part in model.modules()] == before


def test_what_is_stored_is_put_in_order_once() -> None:
    call = call_of(extend(nn.Linear(3, 2, bias=False))(torch.randn(4, 3)))
    stored = call.stored
    assert call.stored is stored
    assert stored.parameters == ("weight",)
    (weight,) = call.module.parameters()
    assert stored.owned == {"weight": (weight, weight._version)}
    call.release()
    assert call.is_released


class Stretching(nn.Module):
    """A keyword that has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return x * self.weight * factor


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_a_hook_that_has_just_been_put_there_adds_a_keyword() -> None:
    model, x = extend(Stretching()), torch.randn(4, 3)
    model.register_forward_pre_hook(
        lambda _, __, kwargs: kwargs.update(factor=3.0), with_kwargs=True
    )
    for _ in range(2):
        check(model, x, 3 * x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))])
def test_keywords_that_a_hook_sees_can_be_copied(duplicate: Any) -> None:
    model, x, seen = extend(Stretching()), torch.randn(4, 3), []
    model.register_forward_hook(
        lambda _, __, kwargs, ___: seen.append(duplicate(kwargs)), with_kwargs=True
    )
    model(x, factor=2.0)
    assert seen == [{"factor": 2.0}]
    assert type(seen[0]) is dict


def test_keywords_that_a_hook_keeps_hold_no_graph() -> None:
    first, second, seen, before = extend(nn.Linear(3, 3)), extend(Stretching()), [], live_calls()
    second.register_forward_hook(lambda _, __, kwargs, ___: seen.append(kwargs), with_kwargs=True)
    second(first(torch.randn(4, 3)))
    assert live_calls() == before


class Summing(Scaled):
    """Of a list of tensors."""

    def forward(self, tensors: list[Tensor]) -> Tensor:  # type: ignore[override]
        return sum(tensors) * self.weight


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
def test_a_list_that_gets_what_is_made_of_it() -> None:
    """As in a DenseNet: what is stored has the entries of then, and holds no call of its own."""
    model, x, before = (
        extend(nn.ModuleList([Summing(), Summing()])),
        torch.randn(4, 3),
        live_calls(),
    )

    def forward() -> list[Tensor]:
        features = [x]
        for part in model:
            features.append(part(features))
        return features

    forward()
    assert live_calls() == before
    features = forward()
    with backpack(BatchGrad(fail_mode="autodiff")):
        features[-1].sum().backward()
    first, second = model.parameters()
    torch.testing.assert_close(vars(second)["grad_batch"], x + features[1].detach())
    torch.testing.assert_close(vars(first)["grad_batch"], x * second.detach())


def test_a_tuple_of_tensors_holds_no_call() -> None:
    class Stateful(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            self.state: Any = (result, x)
            return result

    class StatefulRule(ShiftingRule):
        module_types = (Stateful,)

    with temporary_plugin(StatefulRule):
        model, before = extend(Stateful(state=())), live_calls()
        for state in ((1, 2), (3, 4)):
            model(torch.randn(4, 3))
            model.state = state
            assert live_calls() == before
        traits = traits_of(model)
        assert tuple(traits.settings) == (("training", "state"), (True, (3, 4)))


class Waiting(nn.Module):
    """Computes a parameter when two threads ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=30)

    def forward(self, weight: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            self.barrier.wait()
        return weight.square()


def test_a_parameter_is_computed_in_two_threads_at_once() -> None:
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    extend(parametrize.register_parametrization(model, "weight", Waiting()))
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(model, [x, x]))
    computed = [call_of(output).stored.owned["weight"][0] for output in outputs]
    assert computed[0] is not computed[1]


@pytest.mark.parametrize(
    "change",
    [lambda layer: layer.padding.reverse(), lambda layer: setattr(layer, "padding", [1, 0])],
)
def test_a_list_among_the_settings_of_a_layer_changes_before_the_backward_pass(change: Any) -> None:
    layer, x = nn.Conv2d(1, 1, 1), torch.randn(3, 1, 4, 4)
    layer.stride, layer.dilation, model = [1, 1], [1, 1], extend(layer)  # type: ignore[assignment]
    for _ in range(2):
        vars(layer)["padding"] = [0, 1]
        output = model(x)
        (expected,) = torch.autograd.grad(output.square().sum(), layer.weight, retain_graph=True)
        change(layer)
        with backpack(BatchGrad(), check="never"):
            output.square().sum().backward()
        torch.testing.assert_close(vars(layer.weight)["grad_batch"].sum(0), expected)
