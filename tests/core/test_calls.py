"""Records of forward passes die with the graph, by reference count alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backpack_core import View, backpack, extend
from backpack_core.errors import OverwrittenInputError, ReleasedIOError, UsageError
from backpack_core.extensions import BatchGrad, DiagGGNExact
from backpack_core.record.call import Call, edge_of
from backpack_core.record.state import settings_of
from backpack_operations.chosen import of_samples
from backpack_operations.survey import GraphSurvey
from backpack_operations.surveying import look_behind
from backpack_products.some_samples import subsample
from tests.cases import Net, classification
from tests.leftovers import live_calls


class ClassToken(nn.Module):
    """A parameter and a child of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.child(x * self.token)
        return result


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def _twice() -> nn.Module:
    return Net(lambda net, x: net.a(net.act(net.a(x))), a=nn.Linear(4, 4), act=nn.Tanh())


def _splits() -> nn.Module:
    return Net(lambda net, x: torch.cat(net.a(x).chunk(2, 1), 1), a=nn.Linear(4, 4))


def _tuples() -> nn.Module:
    return Net(
        lambda net, x: sum(net.pair(net.a(x))),
        a=nn.Linear(4, 4),
        pair=Net(lambda _, x: (torch.sin(x), x)),
    )


def _overwritten(*parts: nn.Module) -> nn.Module:
    """The last of some modules returns a view of its input, and that is changed in place."""

    def forward(net: Any, x: Tensor) -> Tensor:
        result: Tensor = net.b(net.part(net.a(x)).relu_())
        return result

    return Net(forward, a=nn.Linear(4, 4), part=nn.Sequential(*parts), b=nn.Linear(4, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    "in_place": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.SiLU(inplace=True)
    ),
    "identity": lambda: nn.Sequential(
        nn.Identity(), nn.Linear(4, 4), nn.Identity(), nn.Flatten(), nn.Dropout(0.0), nn.Identity()
    ),
    "overwritten_identity": lambda: _overwritten(nn.Identity()),
    "overwritten_dropout": lambda: _overwritten(nn.Dropout().eval()),
    "overwritten_flatten": lambda: _overwritten(nn.Unflatten(1, (2, 2)), nn.Flatten()),
    "overwritten_views": lambda: _overwritten(nn.SiLU(), nn.Dropout(0.0), nn.Identity()),
    "twice": _twice,
    "tied": _tied,
    "splits": _splits,
    "tuples": _tuples,
    "class_token": lambda: nn.Sequential(nn.Linear(4, 4), ClassToken(), ClassToken()),
    "residual": lambda: Net(lambda net, x: x + net.a(x + net.a(x)), a=nn.Linear(4, 4)),
    "dict": lambda: Net(
        lambda net, x: net.inner(x)["y"],
        inner=Net(lambda net, x: {"y": net.a(x)}, a=nn.Linear(4, 4)),
    ),
}


@pytest.fixture
def count() -> Iterator[Callable[[], int]]:
    """Counts the live calls of this test, with the garbage collector off."""
    # At its first use, torch.func imports a lot, and leaves a cycle that holds the caller's frames.
    torch.func.vmap(lambda x: torch.func.vjp(torch.sin, x)[1](x)[0])(torch.zeros(2))
    gc.disable()
    before = live_calls()
    yield lambda: live_calls() - before
    gc.enable()


def _nothing(loss: Tensor) -> None:
    assert live_calls() > 0  # the count can be other than zero


def _plain_backward(loss: Tensor) -> None:
    loss.backward()


def _first_order(loss: Tensor) -> None:
    with backpack(BatchGrad()):
        loss.backward()


def _both_orders(loss: Tensor) -> None:
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()


def _debug(loss: Tensor) -> None:
    with backpack(DiagGGNExact(), debug=True):
        loss.backward()


def _retained(loss: Tensor) -> None:
    for _ in range(2):
        with backpack(BatchGrad(), DiagGGNExact(), retain_graph=True):
            loss.backward(retain_graph=True)


def _exception_in_hook(loss: Tensor) -> None:
    def fail(module: nn.Module) -> None:
        if not isinstance(module, nn.CrossEntropyLoss):
            raise KeyError("on purpose")

    try:
        with backpack(DiagGGNExact(), extension_hook=fail):
            loss.backward()
    except KeyError:
        # Autograd keeps what still waited in its queue until the thread's next pass.
        torch.zeros(1, requires_grad=True).sum().backward()
        return
    raise AssertionError("no exception")


def _only_some_inputs(loss: Tensor) -> None:
    leaf = next(n for n in _leaves(loss.grad_fn) if n.requires_grad)
    with backpack(DiagGGNExact()):
        loss.backward(inputs=[leaf])


def _leaves(node: Any) -> Iterator[Tensor]:
    for child, _ in node.next_functions:
        if child is not None:
            yield from [child.variable] if hasattr(child, "variable") else _leaves(child)


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize(
    "use",
    [
        _nothing,
        _plain_backward,
        _first_order,
        _both_orders,
        _debug,
        _retained,
        _exception_in_hook,
        _only_some_inputs,
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_no_call_outlives_the_graph(
    name: str, use: Callable[[Tensor], None], count: Callable[[], int]
) -> None:
    problem = classification(MODELS[name](), (4,), classes=4)
    loss = problem.loss()
    use(loss)
    del loss
    assert count() == 0


@pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")
@pytest.mark.parametrize("name", MODELS)
def test_no_call_outlives_an_exception_in_forward(name: str, count: Callable[[], int]) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    problem = classification(MODELS[name](), (4,), classes=4)
    extend(problem.model)
    modules = [m for m in problem.model.modules() if not list(m.children())]
    handle = modules[-1].register_forward_hook(fail)
    try:
        problem.loss()
    except KeyError:
        handle.remove()
    assert count() == 0
    problem.check(second=False)  # nothing is left behind either
    assert count() == 0


def test_no_call_outlives_a_failing_backward_hook_of_the_user(count: Callable[[], int]) -> None:
    def fail(grad: Tensor) -> None:
        raise KeyError("on purpose")

    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.sin(net.a(x))
        h.register_hook(fail)
        return net.b(h)  # type: ignore[no-any-return]

    problem = classification(Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), (4,))
    loss = problem.loss()
    try:
        with backpack(DiagGGNExact()):
            loss.backward()
    except KeyError:
        pass
    del loss
    assert count() == 0


def test_inputs_and_outputs_are_freed_during_backward() -> None:
    released: list[bool] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    problem = classification(model, (4,), classes=4)
    loss = problem.loss()
    call_of = {call.module: call for call in _calls_behind(loss)}
    done: list[Call] = []

    def hook(module: nn.Module) -> None:
        released.append(all(call.is_released for call in done))
        done.append(call_of[module])

    with backpack(BatchGrad(), extension_hook=hook):
        loss.backward()
    assert released == [True] * 4
    assert all(call.is_released for call in done)
    with pytest.raises(ReleasedIOError, match="retain_graph=True"):
        View(done[0])


def _calls_behind(tensor: Tensor) -> list[Call]:
    edge, survey = edge_of(tensor), GraphSurvey()
    assert edge is not None
    look_behind(survey, [edge])
    return [call for call, _ in survey.sites]


def test_subsample_is_a_view_with_fewer_samples() -> None:
    module = extend(nn.Linear(3, 2))
    y = module(torch.randn(4, 3))
    view = View(*_calls_behind(y))
    some = subsample(view, [2, -4])
    assert some.batch_size == 2
    assert some.full is view
    assert torch.equal(some.input, view.input[[2, 0]])
    assert torch.equal(some.output, y.detach()[[2, 0]])
    with pytest.raises(UsageError, match=r"sample 4, but Linear saw a batch of 4"):
        subsample(view, [4])


@pytest.mark.parametrize("chosen", [[2, -4], [2, -4, 3, 3]])
@pytest.mark.parametrize("positions", [1, 2])
def test_samples_are_counted_in_the_whole_call(positions: int, chosen: list[int]) -> None:
    module = extend(nn.Linear(3, 2))
    (call,) = _calls_behind(module(torch.randn(4 * positions, 3)))
    view = View(call, positions=positions, samples=4)
    rows = view.input.reshape(4, positions, 3)
    some = of_samples(view, chosen)
    assert torch.equal(some.input, rows[chosen].flatten(0, 1))
    again = of_samples(some, [1, 3])
    assert torch.equal(again.input, rows[[1, 3]].flatten(0, 1))
    assert again.full is view
    with pytest.raises(UsageError, match=r"sample 4, but Linear saw a batch of 4"):
        of_samples(some, [4])


def test_overwritten_input_and_output() -> None:
    x = torch.randn(4, 3)
    module = extend(nn.Linear(3, 2))
    y = module(x)
    view = View(*_calls_behind(y))
    x.mul_(2)
    with pytest.raises(OverwrittenInputError, match="its input was changed in place"):
        _ = view.input
    with pytest.raises(OverwrittenInputError, match="its input was changed"):
        _ = subsample(view, [1]).input
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(OverwrittenInputError, match="its output was changed in place"):
        _ = view.output
    assert view.output_shape == (4, 2)


def test_no_call_outlives_a_refused_pass(count: Callable[[], int]) -> None:
    """Autograd refuses it: the sigmoid needs its output, which was overwritten."""
    problem = classification(_overwritten(nn.Sigmoid(), nn.Identity(), nn.Flatten()), (4,))
    loss = problem.loss()
    try:
        with backpack(BatchGrad()):
            loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017 - holds frames
    else:
        raise AssertionError("no exception")
    del loss
    assert count() == 0


def test_settings_are_those_of_the_instance() -> None:
    """Two modules of one class with as many plain attributes of other names."""

    class Scaled(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            setattr(self, name, 2.0)

    assert tuple(settings_of(Scaled("first"))) == (("training", "first"), (True, 2.0))
    assert tuple(settings_of(Scaled("second"))) == (("training", "second"), (True, 2.0))
