"""Core without the library of operations: chains of modules with rules, and what it says else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm

from backpack_core import backpack, extend, hookimpl
from backpack_core.engine.active import Context
from backpack_core.engine.between import Between as Core
from backpack_core.engine.between import between
from backpack_core.errors import MissingPluginError, SampleMixingError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.graph import Survey
from backpack_core.plugins.registration import manager
from backpack_core.plugins.registry import registry
from backpack_core.record.call import edge_of
from backpack_core.testing import temporary_plugin
from backpack_operations import plugin
from backpack_operations.between import Operations

LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(4, 4),
    lambda: nn.Linear(4, 4, bias=False),
    nn.Tanh,
    nn.ReLU,
    lambda: nn.LayerNorm(4),
    lambda: nn.Linear(4, 4).requires_grad_(False),
]


@pytest.fixture
def alone() -> Iterator[None]:
    """The library is not installed."""
    name = manager.get_name(plugin)
    manager.unregister(plugin)
    registry.forget()
    yield
    manager.register(plugin, name)
    registry.forget()


def chain(number: int) -> nn.Sequential:
    choice = random.Random(number)
    made = [make() for make in choice.choices(LAYERS, k=choice.randint(1, 6))]
    return extend(nn.Sequential(*made, nn.Linear(4, 3)))


def walked(kind: type, loss: Tensor) -> Survey:
    edge = edge_of(loss)
    found = kind(Context())
    found.look_behind([edge])
    found.see_through([edge])
    return found.survey


@pytest.mark.parametrize("number", range(20))
def test_both_walks_find_the_same(number: int) -> None:
    model, lossfunc = chain(number), extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(torch.rand(5, 4)), torch.arange(5) % 3)
    if number % 3 == 0:  # what functions make of the last call
        loss = 2 * loss.tanh()
    mine, others = walked(Core, loss), walked(Operations, loss)
    assert [*mine.sites] == [*others.sites]
    assert [*mine.trained.items()] == [*others.trained.items()]
    assert [*mine.uses.items()] == [*others.uses.items()]
    assert mine.batch_size == others.batch_size
    assert not mine.is_shared
    assert not others.is_shared
    assert others.alignment.is_plain


def quantities(model: nn.Module, loss: Tensor) -> list[Tensor]:
    extensions = BatchGrad(), DiagGGNExact()
    with backpack(*extensions):
        loss.backward(retain_graph=True)
    return [
        getattr(parameter, extension.savefield)
        for parameter in model.parameters()
        for extension in extensions
        if parameter.requires_grad
    ]


@pytest.mark.parametrize("number", range(0, 20, 3))
def test_numbers_are_the_same(number: int, request: pytest.FixtureRequest) -> None:
    model, lossfunc = chain(number), extend(nn.CrossEntropyLoss())
    X, y = torch.rand(5, 4), torch.arange(5) % 3
    expected = quantities(model, lossfunc(model(X), y))
    request.getfixturevalue("alone")
    assert between() is Core
    for _ in range(3):  # the last ones go by a plan
        for found, known in zip(quantities(model, lossfunc(model(X), y)), expected, strict=True):
            assert torch.equal(found, known)


@pytest.mark.usefixtures("alone")
def test_first_order_needs_no_extended_loss() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    X, y = torch.rand(5, 3), torch.rand(5, 2)
    with backpack(BatchGrad()):
        ((model(X) - y) ** 2).sum().backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(3, 4), nn.Linear(4, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Unruled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _own(make: Callable[[], nn.Module], **options: object) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        extended = extend(make(), **options)
        return extended(torch.rand(5, 3)).square().sum()

    return loss


def _penalty() -> Tensor:
    model = extend(nn.Linear(3, 2))
    return model(torch.rand(5, 3)).sum() + model.weight.square().sum()


def _handed_over() -> Tensor:
    model = extend(nn.Linear(3, 2))
    weights = {"weight": torch.rand(2, 3, requires_grad=True) * 1}
    return functional_call(model, weights, (torch.rand(5, 3),)).sum()


def _tied() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


OTHERS = {
    "shared": (_own(_tied), "Linear '0' has a parameter that is used more than once"),
    "operation": (
        _own(lambda: Between(torch.exp)),
        r"operation 'Exp' made of the output of Linear 'first'",
    ),
    "no rule": (_own(Unruled), "Unruled has no layer rule"),
    "computed": (_own(lambda: weight_norm(nn.Linear(3, 2))), "computed"),
    "penalty": (_penalty, "'Pow' uses a parameter of shape .2, 3."),
    "handed over": (_handed_over, "functional_call"),
    "rows": (
        lambda: extend(nn.EmbeddingBag(7, 2))(torch.arange(6), torch.tensor([0, 2])).sum(),
        "received 6 rows and returned",
    ),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("loss", "said"), OTHERS.values(), ids=OTHERS)
def test_what_else_there_is_asks_for_the_library(loss: Callable[[], Tensor], said: str) -> None:
    found = loss()
    with (
        pytest.raises(MissingPluginError, match=said) as caught,
        backpack(BatchGrad()),
    ):
        found.backward()
    assert "pip install backpack-operations" in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_what_users_say_asks_for_the_library() -> None:
    model = extend(nn.Linear(3, 2))
    with pytest.raises(MissingPluginError, match=r"samples=.*pip install backpack-operations"):
        backpack(BatchGrad(), samples=torch.tensor([0, 0, 1]))
    with pytest.raises(MissingPluginError, match=r"batch_axis=.*pip install backpack-operations"):
        extend(model, batch_axis=1)
    term = model.weight.sum()
    with (
        pytest.raises(MissingPluginError, match=r"beside=.*pip install backpack-operations"),
        backpack(BatchGrad(), beside=[term]),
    ):
        (model(torch.rand(5, 3)).sum() + term).backward()


@pytest.mark.usefixtures("alone")
def test_curvature_of_a_sum_of_losses_asks_for_the_library() -> None:
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    loss = lossfunc(model(torch.rand(5, 3)), torch.rand(5, 2))
    with pytest.raises(MissingPluginError, match="'Mul'"), backpack(DiagGGNExact()):
        (2 * loss).backward()


@pytest.mark.usefixtures("alone")
def test_samples_that_meet_are_refused() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    with pytest.raises(SampleMixingError, match="BatchNorm1d '1'"), backpack(BatchGrad()):
        model(torch.rand(5, 3)).sum().backward()


def test_the_hook_is_called_when_plugins_change_and_in_no_pass() -> None:
    class Counting:
        calls = 0

        @hookimpl(tryfirst=True)
        def backpack_operation(self) -> None:
            Counting.calls += 1

    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    with temporary_plugin(Counting()):
        for _ in range(4):
            with backpack(BatchGrad()):
                model(torch.rand(5, 3)).sum().backward()
        assert Counting.calls == 1


def test_columns_go_at_once_where_nobody_sends_chunks(request: pytest.FixtureRequest) -> None:
    model, lossfunc = chain(1), extend(nn.CrossEntropyLoss())
    X, y = torch.rand(5, 4), torch.arange(5) % 3
    found = []
    for _ in range(2):
        with backpack(DiagGGNExact(chunk_size=1), check="never"):
            lossfunc(model(X), y).backward()
        found.append([p.diag_ggn_exact.clone() for p in model.parameters() if p.requires_grad])
        if len(found) == 1:
            request.getfixturevalue("alone")
    for in_chunks, at_once in zip(*found, strict=True):
        torch.testing.assert_close(in_chunks, at_once)


@pytest.mark.usefixtures("alone")
def test_a_pass_inside_of_another_asks_for_the_library() -> None:
    model = extend(nn.Linear(3, 2))
    loss, inner = model(torch.rand(5, 3)).sum(), model(torch.rand(5, 3)).sum()
    loss.register_hook(lambda _: inner.backward())
    with pytest.raises(MissingPluginError, match="inside of another"), backpack(BatchGrad()):
        loss.backward()


@pytest.mark.usefixtures("alone")
def test_modules_are_shown_where_no_quantity_is_asked_for() -> None:
    model, seen = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh())), list[nn.Module]()
    with backpack(extension_hook=seen.append):
        model(torch.rand(5, 3)).sum().backward()
    assert seen == [model[1], model[0]]


@pytest.mark.usefixtures("alone")
def test_carriers_ask_for_the_library() -> None:
    extension, model = BatchGrad(), extend(nn.Linear(3, 2))
    extension.carriers[nn.Conv2d] = lambda *_: None
    with pytest.raises(MissingPluginError, match="carriers"), backpack(extension):
        model(torch.rand(5, 3)).sum().backward()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("module", [nn.Unflatten(1, (1, 4)), nn.ReLU(inplace=True)], ids=repr)
def test_a_module_that_returns_no_new_tensor_asks_for_the_library(module: nn.Module) -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), module, nn.Linear(4, 2)))
    with pytest.raises(MissingPluginError, match="pip install backpack-operations"):
        _passed(model)


@pytest.mark.usefixtures("alone")
def test_a_module_that_returns_its_input_is_none() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Flatten(), nn.Linear(4, 2)))
    _passed(model)
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad_batch.sum(0), parameter.grad)


@pytest.mark.usefixtures("alone")
def test_a_layer_that_is_a_function_of_the_last_output_is_refused() -> None:
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.GRU(4, 2)))
    with (
        pytest.raises(MissingPluginError, match="uses a parameter of shape"),
        backpack(BatchGrad()),
    ):
        model(torch.rand(5, 3))[0].sum().backward()


def _passed(model: nn.Module) -> None:
    with backpack(BatchGrad()):
        model(torch.rand(5, 3)).sum().backward()


@pytest.mark.usefixtures("alone")
def test_some_samples_ask_for_the_library() -> None:
    model = extend(nn.Linear(3, 2))
    with (
        pytest.raises(MissingPluginError, match="subsampling"),
        backpack(BatchGrad(subsampling=[0])),
    ):
        model(torch.rand(5, 3)).sum().backward()
