"""Modules that return several tensors, of which some are computed from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backpack_core.errors import UnsupportedError
from tests.cases import Net, classification
from tests.faults.problems import KINDS, check, expect

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")


Function = Callable[..., Any]


def weight() -> nn.Parameter:
    """A parameter for a layer of four features."""
    return nn.Parameter(torch.randn(4))


class Pair(NamedTuple):
    """What some modules return."""

    hidden: Tensor
    active: Tensor


def _scaled(net: Any, x: Tensor) -> Tensor:
    scaled: Tensor = x * net.w
    return scaled


def _chain(net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = _scaled(net, x)
    second = first.tanh()
    return first, second, second.exp()


def _reversed_chain(net: Any, x: Tensor) -> tuple[Tensor, ...]:
    return _chain(net, x)[::-1]


def _diamond(net: Any, x: Tensor) -> tuple[Tensor, ...]:
    first = _scaled(net, x)
    left, right = first.tanh(), first.exp()
    return first, left, right, left * right


def _active_first(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = _scaled(net, x)
    return hidden.tanh(), hidden


def _active_last(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return _active_first(net, x)[::-1]


def _separate(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return _scaled(net, x).tanh(), _scaled(net, x)


def _view(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = _scaled(net, x)
    return hidden, hidden[:, :2].repeat(1, 2)


def _same(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = _scaled(net, x)
    return hidden, hidden


def _dictionary(net: Any, x: Tensor) -> dict[str, Any]:
    hidden = _scaled(net, x)
    return {"hidden": hidden, "rest": [{"active": hidden.tanh()}]}


def _named(net: Any, x: Tensor) -> Pair:
    hidden = _scaled(net, x)
    return Pair(hidden, hidden.tanh())


def _with_integers(net: Any, x: Tensor) -> tuple[Any, ...]:
    hidden = _scaled(net, x)
    return hidden.argmax(1), hidden, None, hidden.tanh(), "text"


def _detached(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = _scaled(net, x)
    return hidden.detach(), hidden.tanh()


def _input_too(net: Any, x: Tensor) -> tuple[Tensor, ...]:
    hidden = _scaled(net, x)
    return x, hidden, hidden * x


def _constant_of_the_weight(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The second output does not depend on the parameter."""
    active = x.tanh()
    return active * net.w, active


def _around_children(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = net.inner(x) * net.w
    return net.outer(hidden), hidden


def _children_only(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = net.inner(x)
    return net.outer(hidden), hidden


def _nested(net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second = net.pair(x * net.w)
    return first, second, first * second


def _sum(*outputs: Tensor) -> Tensor:
    return torch.stack(outputs).sum(0)


def _product(*outputs: Tensor) -> Tensor:
    return torch.stack(outputs).prod(0)


def _side_by_side(*outputs: Tensor) -> Tensor:
    return torch.cat(outputs, 1)


def _number(index: int) -> Function:
    return lambda *outputs: outputs[index]


def _parts(name: str) -> dict[str, Any]:
    if name == "children_only":
        return {"inner": nn.Linear(4, 4), "outer": nn.Linear(4, 4)}
    if name == "around_children":
        return {"inner": nn.Linear(4, 4), "outer": nn.Linear(4, 4), "w": weight()}
    if name == "nested":
        return {"pair": Net(_active_last, w=weight()), "w": weight()}
    return {"w": weight()}


# What a module computes, and how its outputs are joined.
CASES: dict[str, tuple[Function, Function]] = {
    "active_first": (_active_first, _sum),
    "active_last": (_active_last, _sum),
    "product": (_active_last, _product),
    "side_by_side": (_active_last, _side_by_side),
    "only_the_dependent": (_active_last, _number(1)),
    "only_the_first": (_active_last, _number(0)),
    "separate": (_separate, _sum),
    "chain": (_chain, _product),
    "chain_ends": (_chain, lambda first, _, last: first * last),
    "reversed_chain": (_reversed_chain, _sum),
    "diamond": (_diamond, _sum),
    "view": (_view, _sum),
    "same": (_same, _sum),
    "dictionary": (_dictionary, lambda out: out["hidden"] + out["rest"][0]["active"]),
    "named": (_named, _sum),
    "with_integers": (_with_integers, lambda _, hidden, __, active, ___: hidden * active),
    "detached": (_detached, _product),
    "input_too": (_input_too, _sum),
    "constant_of_the_weight": (_constant_of_the_weight, _product),
    "around_children": (_around_children, _sum),
    "children_only": (_children_only, _sum),
    "nested": (_nested, _sum),
}


def net_of(name: str) -> Net:
    """A linear layer, the module, its outputs joined, and a linear layer."""
    function, join = CASES[name]

    def forward(net: Any, x: Tensor) -> Tensor:
        outputs = net.module(torch.tanh(net.first(x)))
        joined = join(outputs) if isinstance(outputs, dict) else join(*outputs)
        return net.last(joined)  # type: ignore[no-any-return]

    parts = {"first": nn.Linear(3, 4), "module": Net(function, **_parts(name))}
    return Net(forward, **parts, last=nn.Linear(8 if name == "side_by_side" else 4, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_dependent_outputs(name: str, kind: str) -> None:
    check(classification(net_of(name), (3,)), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_changed_in_place(kind: str) -> None:
    """What comes to the first output from outside cannot be told from what the second sends."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden, active = net.module(net.first(x))
        return net.last(hidden.add_(active))  # type: ignore[no-any-return]

    parts = {"first": nn.Linear(3, 4), "module": Net(_active_last, w=weight())}
    problem = classification(Net(forward, **parts, last=nn.Linear(4, 3)), (3,))
    expectation = expect(problem.expected, kind)
    with pytest.raises(UnsupportedError, match="changed in place, or what it computes"):
        problem.run(*expectation.extensions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "reduction"), [(1, "mean"), (4, "sum")])
def test_settings(batch: int, reduction: str, kind: str) -> None:
    check(classification(net_of("chain"), (3,), batch, reduction=reduction), kind)


def _cell_once(net: Any, x: Tensor) -> Tensor:
    return net.last(torch.cat(net.cell(x[:, 0]), 1))  # type: ignore[no-any-return]


def _cell_memory(net: Any, x: Tensor) -> Tensor:
    return net.last(net.cell(x[:, 0])[1].repeat(1, 2))  # type: ignore[no-any-return]


def _cell_over_time(net: Any, x: Tensor) -> Tensor:
    state = None
    for step in x.unbind(1):
        state = net.cell(step, state)
    assert state is not None
    return net.last(torch.cat(state, 1))  # type: ignore[no-any-return]


def _cell_states(net: Any, x: Tensor) -> Tensor:
    """Every hidden state is used, and the last memory is not."""
    state, seen = None, []
    for step in x.unbind(1):
        state = net.cell(step, state)
        seen.append(state[0])
    return net.last(torch.cat(seen, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "forward",
    [_cell_once, _cell_memory, _cell_over_time, _cell_states],
    ids=["once", "memory", "over_time", "states"],
)
def test_lstm_cell(forward: Any, kind: str) -> None:
    net = Net(forward, cell=nn.LSTMCell(2, 3), last=nn.Linear(6, 3))
    check(classification(net, (2, 2)), kind)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.RNNCell])
def test_cells_with_one_output(cell: Any, kind: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(net.cell(x[:, 1], net.cell(x[:, 0])))  # type: ignore[no-any-return]

    net = Net(forward, cell=cell(2, 3), last=nn.Linear(3, 3))
    check(classification(net, (2, 2)), kind)


def _attend(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    weights = ((x @ net.query) @ (x @ net.key).mT).softmax(-1)
    return weights @ x, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_attention_that_returns_its_weights(used: tuple[int, ...], kind: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        outputs = net.attention(x)
        return net.last(torch.cat([outputs[i].flatten(1) for i in used], 1))  # type: ignore[no-any-return]

    parts = {name: nn.Parameter(torch.randn(2, 2)) for name in ("query", "key")}
    last = nn.Linear(sum((6, 9)[i] for i in used), 3)
    check(classification(Net(forward, attention=Net(_attend, **parts), last=last), (3, 2)), kind)


def test_inside_a_checkpoint() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        outputs = checkpoint(lambda x: net.module(net.first(x)), x, use_reentrant=False)
        return net.last(_sum(*outputs))  # type: ignore[no-any-return]

    parts = {"first": nn.Linear(3, 4), "module": Net(_active_last, w=weight())}
    check(classification(Net(forward, **parts, last=nn.Linear(4, 3)), (3,)), "gradients")
