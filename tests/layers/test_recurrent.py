"""Recurrent rules against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from handmade import (
    assert_equal,
    check_input,
    check_parameters,
    columns,
    differentiable,
    draw,
    input_oracle,
    make_view,
    parameter_oracle,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from backpack_core.errors import UnsupportedError
from backpack_core.record.view import View
from backpack_layers.recurrent import GRURule, LSTMRule, RecurrentRule, RNNRule
from backpack_products.some_samples import subsample

pytestmark = pytest.mark.usefixtures("without_cudnn")

INPUT, HIDDEN, STEPS = 3, 2, 4

KINDS: dict[str, tuple[RecurrentRule, type[nn.RNNBase], dict[str, Any]]] = {
    "tanh": (RNNRule(), nn.RNN, {}),
    "relu": (RNNRule(), nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (LSTMRule(), nn.LSTM, {}),
    "gru": (GRURule(), nn.GRU, {}),
    "projected": (LSTMRule(), nn.LSTM, {"proj_size": 1}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "layers": {"num_layers": 3},
    "bidirectional": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
BATCHES = pytest.mark.parametrize("batch", [1, 3])


def build(kind: str, **options: Any) -> tuple[RecurrentRule, nn.RNNBase]:
    rule, module, own = KINDS[kind]
    built = module(INPUT, HIDDEN, **{"batch_first": True, **own, **options}).double().eval()
    for theta in built.parameters():
        nn.init.normal_(theta, std=0.7)
    return rule, built


def initial(module: nn.RNNBase, batch: int) -> Any:
    shape = (module.num_layers * (2 if module.bidirectional else 1), batch)
    hidden = draw(*shape, module.proj_size or HIDDEN)
    return (hidden, draw(*shape, HIDDEN)) if isinstance(module, nn.LSTM) else hidden


@pytest.mark.grid(3)
@BATCHES
@EVERY_KIND
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("given", [False, True], ids=["zero state", "given state"])
def test_sequence(batch: int, kind: str, shape: dict[str, Any], given: bool) -> None:
    rule, module = build(kind, **shape)
    states = (initial(module, batch),) if given else ()
    view = make_view(module, draw(batch, STEPS, INPUT), *states)
    check_input(rule, view)
    check_parameters(rule, view)


@BATCHES
@pytest.mark.parametrize(
    ("kind", "output"), [*((kind, 1) for kind in KINDS), ("lstm", 2), ("projected", 2)]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_final_states(batch: int, kind: str, shape: dict[str, Any], output: int) -> None:
    rule, module = build(kind, **shape)
    states = initial(module, batch)
    view = make_view(module, draw(batch, STEPS, INPUT), hx=states, index=output, axis=1)
    assert rule.batch_axis(view, output) == 1
    moved = columns(view)
    mat = moved.movedim(1, 2)
    products = rule.jac_t_mat_prod(view, moved)
    for product, reference in zip(products, input_oracle(view, mat), strict=True):
        assert product is not None
        assert reference is not None
        assert_equal(product, reference)
    for name, _ in module.named_parameters():
        found = rule.param_jac_t_mat_prod(view, name, moved)
        assert_equal(found, parameter_oracle(view, name, mat, axis=1))


@EVERY_KIND
def test_one_step(kind: str) -> None:
    rule, module = build(kind)
    view = make_view(module, draw(2, 1, INPUT))
    check_input(rule, view)
    check_parameters(rule, view)


@EVERY_KIND
@pytest.mark.parametrize("layers", [2, 3], ids=["fewer layers", "as many layers as samples"])
def test_view(kind: str, layers: int) -> None:
    """A view shows the samples it should, also where initial states look like a batch."""
    rule, module = build(kind, num_layers=layers)
    view = make_view(module, draw(3, STEPS, INPUT), initial(module, 3))
    mat, chosen = columns(view), [-1, 0]
    part = subsample(view, chosen)
    found = rule._jac_t_mat_prod(part, mat[:, chosen])
    whole = rule._jac_t_mat_prod(view, mat)
    for axis, product, all_samples in zip((1, 2, 2), found, whole, strict=False):
        assert product is not None
        assert all_samples is not None
        assert_equal(product, all_samples.index_select(axis, torch.tensor(chosen) % 3))
    for name, _ in module.named_parameters():
        of_part = rule.param_jac_t_mat_prod(part, name, mat[:, chosen])
        assert_equal(of_part, rule.param_jac_t_mat_prod(view, name, mat)[:, chosen])


@EVERY_KIND
def test_one_recursion_for_all_parameters(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, module = build(kind)
    view = make_view(module, draw(2, STEPS, INPUT))
    mat, runs = columns(view), []
    carry_back = rule._carry_back

    def counted(view: View, mat: Tensor, layers: Any) -> Any:
        runs.append(mat)
        return carry_back(view, mat, layers)

    monkeypatch.setattr(rule, "_carry_back", counted)
    rule.jac_t_mat_prod(view, mat)
    for name, _ in module.named_parameters():
        rule.param_jac_t_mat_prod(view, name, mat)
    assert len(runs) == 1


@EVERY_KIND
def test_differentiable(kind: str) -> None:
    """Under ``create_graph`` the products depend on inputs and parameters."""
    rule, module = build(kind, num_layers=2)
    x = draw(2, STEPS, INPUT).requires_grad_()
    view = differentiable(make_view(module, x))
    mat = columns(view, 1)
    product = rule.jac_t_mat_prod(view, mat)[0]
    assert product is not None
    (first,) = torch.autograd.grad(module(x)[0], x, mat[0], create_graph=True)
    wanted = [x, *module.parameters()]
    found = torch.autograd.grad((product**2).sum(), wanted, materialize_grads=True)
    expected = torch.autograd.grad((first**2).sum(), wanted, materialize_grads=True)
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


@EVERY_KIND
def test_adjoint(kind: str) -> None:
    """``⟨J u, w⟩ = ⟨u, Jᵀ w⟩`` with ``J u`` by the double-backward trick."""
    rule, module = build(kind, bidirectional=True)
    x = draw(2, STEPS, INPUT).requires_grad_()
    view = make_view(module, x)
    w, u = columns(view, 1), draw(2, STEPS, INPUT)
    dual = torch.zeros_like(w[0], requires_grad=True)
    (back,) = torch.autograd.grad(module(x)[0], x, dual, create_graph=True)
    (forward,) = torch.autograd.grad(back, dual, u)
    with torch.no_grad():
        product = rule.jac_t_mat_prod(view, w)[0]
    assert product is not None
    assert float((forward * w[0]).sum()) == pytest.approx(float((product[0] * u).sum()), rel=1e-10)


def test_second_derivative_of_a_piecewise_linear_recursion() -> None:
    """It vanishes, instead of an error of autograd."""
    module = nn.RNN(INPUT, 3, nonlinearity="relu", batch_first=True).double()
    view, mat = make_view(module, draw(2, STEPS, INPUT)), draw(2, 2, STEPS, INPUT)
    found = RNNRule()._second_derivative_mat_prod(view, torch.ones_like(view.output), mat)
    assert torch.equal(found, torch.zeros_like(mat))


def test_oracle_sees_a_missing_state() -> None:
    rule, module = build("lstm")
    state = initial(module, 2)
    view = make_view(module, draw(2, STEPS, INPUT), state)
    without = make_view(module, view.inputs[0])
    mat = columns(view)
    found = rule.jac_t_mat_prod(without, mat)[0]
    expected = input_oracle(view, mat)[0]
    assert found is not None
    assert expected is not None
    with pytest.raises(AssertionError, match="relative error"):
        assert_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"batch_first": False}, (2, 3, INPUT), "batch_first=True"),
        ({}, (3, INPUT), "without a batch axis"),
    ],
    ids=["batch second", "unbatched"],
)
def test_refused(options: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    rule, module = build("lstm", **options)
    with pytest.raises(UnsupportedError, match=message):
        rule.check(make_view(module, draw(*shape)))


def test_refuses_dropout_in_training_and_packed_sequences() -> None:
    rule, module = build("gru", num_layers=2, dropout=0.5)
    view = make_view(module, draw(2, 3, INPUT))
    rule.check(view)
    with pytest.raises(UnsupportedError, match="drops activations"):
        rule.check(make_view(module.train(), draw(2, 3, INPUT)))
    packed = pack_padded_sequence(draw(2, 3, INPUT), [3, 2], batch_first=True)
    with pytest.raises(UnsupportedError, match="PackedSequence"):
        rule.check(make_view(module.eval(), packed))


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_chosen_samples_with_given_states(kind: str) -> None:
    """With two directions and two samples, axis 0 of the states is as long as the batch."""
    rule, module = build(kind, bidirectional=True)
    x, states = draw(2, STEPS, INPUT), initial(module, 2)
    part = tuple(s[:, 1:] for s in states) if isinstance(states, tuple) else states[:, 1:]
    whole, alone = make_view(module, x, states), make_view(module, x[1:], part)
    chosen = subsample(whole, [1])
    grad, mat = draw(1, STEPS, 2 * HIDDEN), draw(2, 1, STEPS, INPUT)
    ours = rule._second_derivative_mat_prod(chosen, grad, mat)
    assert_equal(ours, rule._second_derivative_mat_prod(alone, grad, mat))
