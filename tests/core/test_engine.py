"""One backward pass through modules: exact numbers, or an error, and never state left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_core import LayerRule, ModuleCall, backpack, extend
from backpack_core.errors import (
    AutodiffFallbackWarning,
    OverwrittenInputError,
    ReleasedIOError,
    ShapeError,
    UnsupportedError,
)
from backpack_core.extensions import BatchGrad, DiagGGNExact, SumGradSquared
from backpack_core.plugins import temporary_plugin
from tests import oracle
from tests.cases import Net, Problem, classification


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


# In-place modules.


@pytest.mark.parametrize(
    "make",
    [nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Hardswish, nn.SELU, nn.Dropout],
)
def test_in_place_module(make: Any) -> None:
    """Where a derivative needs the overwritten input, autograd's own copy answers."""
    model = nn.Sequential(nn.Linear(3, 4), make(inplace=True), nn.Linear(4, 3))
    problem = classification(model, (3,))
    model.eval()
    problem.check()


def test_in_place_modules_after_functions_and_views() -> None:
    model = Net(
        lambda net, x: net.c(net.silu(net.relu(torch.sin(net.a(x))).view(-1, 4) * 1).flatten(1)),
        a=nn.Linear(3, 4),
        relu=nn.ReLU(inplace=True),
        silu=nn.SiLU(inplace=True),
        c=nn.Linear(4, 3),
    )
    classification(model, (3,)).check()


def test_in_place_addition_of_a_residual() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.a(x)
        branch = net.b(torch.tanh(h))
        branch += h
        return net.c(branch)  # type: ignore[no-any-return]

    model = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3))
    classification(model, (3,)).check()


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_input_overwritten_before_backward(extension: Any) -> None:
    """Autograd would not notice where the weight is frozen, and is not asked where we notice."""
    problem = classification(nn.Linear(3, 3), (3,))
    loss = problem.loss()
    problem.inputs[0].mul_(2)
    with (
        pytest.raises(OverwrittenInputError, match=r"Linear.*changed in place.*out-of-place"),
        backpack(extension()),
    ):
        loss.backward()


# What a module receives and returns.


def test_keyword_inputs() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Bilinear(3, 3, 4), nn.Linear(4, 3)

        def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
            h = self.a(input2=right, input1=left)
            result: Tensor = self.b(input=torch.tanh(h))
            return result

    mixed = Mixed()
    model = Net(
        lambda net, x, z: net.m(right=net.r(z), left=net.l(x)),
        m=mixed,
        r=nn.Linear(3, 3),
        l=nn.Linear(3, 3),
    )
    problem = classification(model, (3,))
    problem.inputs = (*problem.inputs, torch.randn(3, 3))
    problem.check()


def test_keyword_inputs_of_the_loss() -> None:
    model, lossfunc = extend(mlp()), extend(nn.CrossEntropyLoss())
    problem = classification(model, (3,))
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    with backpack(DiagGGNExact()):
        lossfunc(target=problem.target, input=model(problem.inputs[0])).backward()
    problem.compare("diag_ggn_exact", expected)


@pytest.mark.parametrize("container", ["tuple", "dict", "nested"])
def test_module_that_returns_several_tensors(container: str) -> None:
    def pack(a: Tensor, b: Tensor) -> Any:
        return {"tuple": (a, b), "dict": {"a": a, "b": b}, "nested": [{"x": (a,)}, b]}[container]

    def unpack(value: Any) -> tuple[Tensor, Tensor]:
        if container == "dict":
            return value["a"], value["b"]
        return (value[0]["x"][0], value[1]) if container == "nested" else value

    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = unpack(net.leaf(net.stem(x)))
        return net.last(a * b)  # type: ignore[no-any-return]

    leaf = Net(lambda _, x: pack(torch.sin(x), torch.cos(x)))
    model = Net(forward, stem=nn.Linear(3, 4), leaf=leaf, last=nn.Linear(4, 3))
    classification(model, (3,)).check()


def test_module_with_parameters_that_returns_a_tuple() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * self.scale, torch.sin(self.scale + x), x.detach()

    def forward(net: Any, x: Tensor) -> Tensor:
        a, b, _ = net.pair(net.stem(x))
        return net.last(a * b)  # type: ignore[no-any-return]

    model = Net(forward, stem=nn.Linear(3, 4), pair=Pair(), last=nn.Linear(4, 3))
    with pytest.warns(AutodiffFallbackWarning):
        classification(model, (3,)).check()


def test_lstm_with_both_outputs() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        out, (hidden, _) = net.lstm(x)
        return net.last(out[:, -1] + hidden[0] * out[:, 0])  # type: ignore[no-any-return]

    lstm = nn.LSTM(3, 4, batch_first=True)
    classification(Net(forward, lstm=lstm, last=nn.Linear(4, 3)), (2, 3)).check()


# Subclasses.


class Plain(nn.Linear):
    """No forward of its own."""


class Doubled(nn.Linear):
    """Computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_subclass_without_a_forward_has_its_parents_rule() -> None:
    classification(nn.Sequential(Plain(3, 4), nn.Tanh(), Plain(4, 3)), (3,)).check()


def test_subclass_with_a_forward_has_no_rule_of_its_parent() -> None:
    problem = classification(nn.Sequential(Doubled(3, 4), nn.Tanh(), Doubled(4, 3)), (3,))
    with pytest.warns(AutodiffFallbackWarning, match="Doubled '2' has no layer rule"):
        problem.check()


def test_forward_replaced_on_the_instance() -> None:
    model = mlp()
    plain = model[0].forward
    model[0].forward = lambda x: 3 * plain(x)
    problem = classification(model, (3,))
    reference = classification(
        Net(
            lambda net, x: net.m[2](torch.tanh(3 * F.linear(x, net.m[0].weight, net.m[0].bias))),
            m=mlp(),
        ),
        (3,),
    )
    reference.model.m.load_state_dict(model.state_dict())  # type: ignore[union-attr, operator]
    reference.inputs, reference.target = problem.inputs, problem.target
    expected = reference.expected(oracle.individual_gradients)
    with pytest.warns(AutodiffFallbackWarning):
        problem.run(BatchGrad())
    problem.compare("grad_batch", expected)


# Scales, losses, gradients.


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_scaled_loss(factor: float) -> None:
    problem = classification(mlp(), (3,))
    scaled = Problem(
        problem.model,
        problem.inputs,
        Net(lambda net, out, y: factor * F.cross_entropy(out, y)),
        problem.target,
    )
    gradients = scaled.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in scaled.expected(oracle.ggn_diagonals)]
    loss = problem.loss()
    with backpack(BatchGrad(), DiagGGNExact()):
        (factor * loss).backward()
    problem.compare("grad_batch", gradients)
    problem.compare("diag_ggn_exact", diagonals)


def test_negative_loss_has_no_square_root() -> None:
    loss = classification(mlp(), (3,)).loss()
    with pytest.raises(UnsupportedError, match="negative"), backpack(DiagGGNExact()):
        (-loss).backward()


def test_gradient_accumulation() -> None:
    model = mlp()
    parts = [classification(model, (3,), batch) for batch in (2, 4)]
    gradients = [p.expected(oracle.individual_gradients) for p in parts]
    model.zero_grad()
    for part, expected in zip(parts, gradients, strict=True):
        loss = part.loss()
        with backpack(BatchGrad()):
            (loss / 2).backward()
        part.compare("grad_batch", [g / 2 for g in expected])
    total = [(a.sum(0) + b.sum(0)) / 2 for a, b in zip(*gradients, strict=True)]
    parts[0].compare("grad", total)


def test_frozen_first_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 3))
    for p in model[:3].parameters():
        p.requires_grad_(False)
    classification(model, (3,)).check()


def test_frozen_layer_in_the_middle() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[1].requires_grad_(False)
    classification(model, (3,)).check()


@pytest.mark.parametrize("leaf", [True, False])
def test_input_that_requires_a_gradient(leaf: bool) -> None:
    problem = classification(nn.Sequential(nn.Identity(), *mlp()), (3,))
    expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    x = problem.inputs[0].requires_grad_()
    problem.inputs = (x if leaf else torch.sin(torch.asin(x / 10)) * 10,)
    problem.run(DiagGGNExact(), BatchGrad())
    problem.compare("diag_ggn_exact", expected)
    assert x.grad is not None


def test_scalar_weights_and_other_shapes() -> None:
    """A classifier of two inputs of different shapes."""
    model = Net(
        lambda net, x, image: net.head(torch.cat([net.a(x), net.conv(image).flatten(1)], 1)),
        a=nn.Linear(3, 2),
        conv=nn.Conv2d(1, 2, 2),
        head=nn.Linear(10, 3),
    )
    problem = classification(model, (3,))
    problem.inputs = (*problem.inputs, torch.randn(3, 1, 3, 3))
    problem.check()


# The shape of the batch.


def test_positions_merged_into_the_batch() -> None:
    """[N, T, C] flattened to [N*T, C]: then axis 0 is no longer the samples."""
    model, lossfunc = extend(nn.Linear(3, 4)), extend(nn.CrossEntropyLoss())
    logits = model(torch.randn(2, 5, 3))
    loss = lossfunc(logits.flatten(0, 1), torch.randint(0, 4, (10,)))
    with (
        pytest.raises(ShapeError, match=r"batch of 2, but CrossEntropyLoss one of 10"),
        backpack(BatchGrad()),
    ):
        loss.backward()


def test_module_that_merges_the_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0, 1), nn.Linear(4, 3))
    problem = classification(model, (2, 3))
    problem.target = torch.randint(0, 3, (6,))
    with pytest.raises((UnsupportedError, ShapeError), match="batch"):
        problem.run(BatchGrad())


def test_batch_of_another_size_in_the_next_iteration() -> None:
    model = mlp()
    for batch in (5, 2):
        classification(model, (3,), batch).check()


# Errors, and a clean pass after them.


class Picky(nn.Module):
    """A layer whose rule can be told to fail."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class PickyRule(LayerRule):
    module_types = (Picky,)
    failing = True
    shape: tuple[int, ...] | None = None

    def _jac_t_mat_prod(self, call: ModuleCall, mat: Tensor) -> Tensor:
        if type(self).failing:
            raise KeyError("on purpose")
        return 2 * mat if self.shape is None else mat.new_zeros(self.shape)


@pytest.mark.parametrize("retain", [True, False])
def test_exception_in_a_rule_then_a_clean_pass(retain: bool, monkeypatch: Any) -> None:
    between = Net(lambda _, x: torch.sin(x))
    model = nn.Sequential(nn.Linear(3, 4), Picky(), between, nn.Linear(4, 3))
    with temporary_plugin(PickyRule):
        problem = classification(model, (3,))
        loss = problem.loss()
        with (
            pytest.raises(KeyError, match="on purpose") as caught,
            backpack(DiagGGNExact(), retain_graph=retain),
        ):
            loss.backward(retain_graph=retain)
        notes = "".join(getattr(caught.value, "__notes__", ["Picky '1' PickyRule DiagGGNExact"]))
        assert "Picky '1'" in notes
        assert "PickyRule" in notes
        assert "DiagGGNExact" in notes
        monkeypatch.setattr(PickyRule, "failing", False)
        if retain:
            expected = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
            with backpack(DiagGGNExact()):
                loss.backward()
            problem.compare("diag_ggn_exact", expected)
        problem.check()


def test_exception_inside_the_block_then_a_clean_pass_in_the_same_block() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss, other = problem.loss(), problem.loss()
    calls: list[nn.Module] = []

    def fail_once(module: nn.Module) -> None:
        calls.append(module)
        if len(calls) == 3:
            raise KeyError("on purpose")

    with backpack(BatchGrad(), extension_hook=fail_once):
        with pytest.raises(KeyError):
            loss.backward()
        other.backward()
    problem.compare("grad_batch", expected)


def test_wrong_shape_from_a_rule(monkeypatch: Any) -> None:
    monkeypatch.setattr(PickyRule, "failing", False)
    monkeypatch.setattr(PickyRule, "shape", (1, 1))
    model = nn.Sequential(nn.Linear(3, 4), Picky(), nn.Linear(4, 3))
    with temporary_plugin(PickyRule), pytest.raises(ShapeError) as caught:
        classification(model, (3,)).run(DiagGGNExact())
    message = str(caught.value)
    for word in ("PickyRule._jac_t_mat_prod returned shape [1, 1]", "Picky '1'", "[3, 3, 4]"):
        assert word in message
    assert "DiagGGNExact of backpack-plugin-secondorder" in message
    assert "registered by hand" in message


# retain_graph, create_graph, pruning.


def test_retain_graph() -> None:
    problem = classification(nn.Sequential(*mlp(), Net(lambda _, x: torch.sin(x))), (3,))
    loss = problem.loss()
    results = []
    for _ in range(2):
        with backpack(BatchGrad(), SumGradSquared(), DiagGGNExact(), retain_graph=True):
            loss.backward(retain_graph=True)
        results.append(problem.fields("grad_batch") + problem.fields("diag_ggn_exact"))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    with backpack(BatchGrad()):
        loss.backward(retain_graph=True)
    with pytest.raises(ReleasedIOError, match="retain_graph=True"), backpack(BatchGrad()):
        loss.backward()


def test_retained_graph_of_a_backward_pass_without_a_context() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss = problem.loss()
    loss.backward(retain_graph=True)
    with backpack(BatchGrad()):
        loss.backward()
    problem.compare("grad_batch", expected)


def test_only_some_inputs() -> None:
    problem = classification(nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(3, 3)), (3,))
    model = problem.model
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    loss = problem.loss()
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward(inputs=[model[2].weight])  # type: ignore[index]
    assert [hasattr(p, "grad_batch") for p in problem.parameters] == [False] * 2 + [True] * 4
    for position in range(2, 6):
        oracle.assert_close(problem.parameters[position].grad_batch, gradients[position])  # type: ignore[attr-defined]
        oracle.assert_close(problem.parameters[position].diag_ggn_exact, diagonals[position])  # type: ignore[attr-defined]
    assert [p.grad is not None for p in problem.parameters] == [False] * 2 + [True] + [False] * 3


def test_some_inputs_leave_no_partial_sum_over_calls() -> None:
    """The first of two calls is never reached: half of the sum would be wrong."""
    model = Net(
        lambda net, x: net.c(net.a(torch.tanh(net.b(torch.tanh(net.a(x)))))),
        a=nn.Linear(3, 3),
        b=nn.Linear(3, 3),
        c=nn.Linear(3, 3),
    )
    problem = classification(model, (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss = problem.loss()
    with backpack(BatchGrad()):
        loss.backward(inputs=[model.b.weight])
    assert not hasattr(model.a.weight, "grad_batch")
    oracle.assert_close(model.b.weight.grad_batch, expected[2])


def test_autograd_grad_inside_the_context() -> None:
    problem = classification(mlp(), (3,))
    expected = problem.expected(oracle.individual_gradients)
    loss = problem.loss()
    with backpack(BatchGrad()):
        grads = torch.autograd.grad(loss, problem.parameters)
    problem.compare("grad_batch", expected)
    for grad, individual in zip(grads, expected, strict=True):
        oracle.assert_close(grad, individual.sum(0))
    assert all(p.grad is None for p in problem.parameters)


MODELS_TO_DIFFERENTIATE = {
    "tanh": mlp,
    "sigmoid": lambda: nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3)),
    "softmax": lambda: nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 3)),
    "in_place": lambda: nn.Sequential(nn.Linear(3, 4), nn.SiLU(inplace=True), nn.Linear(4, 3)),
    "elu_in_place": lambda: nn.Sequential(nn.Linear(3, 4), nn.ELU(inplace=True), nn.Linear(4, 3)),
    "function": lambda: Net(
        lambda net, x: net.b(torch.sin(net.a(x)) * net.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 3)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)
    ),
    "last": lambda: nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()),
}


@pytest.mark.parametrize("name", MODELS_TO_DIFFERENTIATE)
@pytest.mark.parametrize("field", ["grad_batch", "sum_grad_squared", "diag_ggn_exact"])
def test_quantities_can_be_differentiated(name: str, field: str) -> None:
    """With create_graph=True, against the differentiated oracle."""
    model = MODELS_TO_DIFFERENTIATE[name]()
    problem = classification(model, (3,))
    x, y = problem.inputs[0], problem.target
    weights = [torch.randn_like(p) for p in model.parameters()]

    def loss_of(out: Tensor) -> Tensor:
        return F.cross_entropy(out, y)

    def plain(*values: Tensor) -> Tensor:
        """A function of the quantities, through torch.func."""

        def single(ps: tuple[Tensor, ...], n: int) -> Tensor:
            names = [k for k, _ in model.named_parameters()]
            out = torch.func.functional_call(model, dict(zip(names, ps, strict=True)), x[n : n + 1])
            return out[0]

        total = torch.zeros(())
        samples = range(len(x))
        for n in samples:
            if field == "diag_ggn_exact":
                jac = torch.func.jacrev(single)(values, n)
                p = single(values, n).softmax(0)
                hessian = (p.diag() - p.outer(p)) / len(x)
                parts = [torch.einsum("c...,cd,d...->...", j, hessian, j) for j in jac]
            else:
                grads = torch.func.grad(
                    lambda ps: F.cross_entropy(single(ps, n)[None], y[n : n + 1]) / len(x)
                )(values)
                parts = [g if field == "grad_batch" else g**2 for g in grads]
            scale = n + 1 if field == "grad_batch" else 1
            total = total + sum(scale * (w * q).sum() for w, q in zip(weights, parts, strict=True))
        return total

    from backpack_core import disable

    with disable():
        values = tuple(p.detach().requires_grad_() for p in model.parameters())
        expected = torch.autograd.grad(plain(*values), values)
    loss = problem.loss()
    with backpack(BatchGrad(), SumGradSquared(), DiagGGNExact()):
        grads = torch.autograd.grad(loss, problem.parameters, create_graph=True)
    ramp = torch.arange(1.0, len(x) + 1)
    total = sum(
        (torch.einsum("n,n...->...", ramp, q) * w).sum() if field == "grad_batch" else (q * w).sum()
        for q, w in zip(problem.fields(field), weights, strict=True)
    )
    found = torch.autograd.grad(total, problem.parameters, retain_graph=True)
    for ours, reference in zip(found, expected, strict=True):
        assert reference.abs().max() > 0 or name == "in_place"
        oracle.assert_close(ours, reference)
    # The graph survives: the gradient itself can still be differentiated.
    torch.autograd.grad(sum(g.sum() for g in grads), problem.parameters)
    for p in problem.parameters:
        for attribute in ("grad_batch", "sum_grad_squared", "diag_ggn_exact"):
            delattr(p, attribute)


def test_gradient_hook_inside_a_pass_may_run_another_pass() -> None:
    outer, inner = classification(mlp(), (3,)), classification(mlp(), (3,))
    expected = [p.expected(oracle.individual_gradients) for p in (outer, inner)]
    other = inner.loss()
    todo = [other]

    def nested(module: nn.Module) -> None:
        if todo:
            todo.pop().backward()

    loss = outer.loss()
    with backpack(BatchGrad(), extension_hook=nested):
        loss.backward()
    outer.compare("grad_batch", expected[0])
    inner.compare("grad_batch", expected[1])


# Lower precision.


def test_autocast() -> None:
    """Within the precision of bfloat16, and in the dtype of the parameter's gradient."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )
    problem = classification(model, (8,), 6, 4)
    gradients = problem.expected(oracle.individual_gradients)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.rtol = 0.1
    with torch.autocast("cpu", torch.bfloat16):
        loss = problem.loss()
    with backpack(BatchGrad(), DiagGGNExact()):
        loss.backward()
    for p in problem.parameters:
        assert p.grad_batch.dtype == p.diag_ggn_exact.dtype == torch.float32  # type: ignore[attr-defined]
    problem.compare("grad_batch", gradients)
    problem.compare("diag_ggn_exact", diagonals)


def test_autocast_with_functions_between() -> None:
    torch.set_default_dtype(torch.float32)
    model = Net(
        lambda net, x: net.b(F.silu(net.a(x)) + torch.sin(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 4)
    )
    problem = classification(model, (8,), 6, 4)
    diagonals = [d.sum(0) for d in problem.expected(oracle.ggn_diagonals)]
    problem.rtol = 0.1
    with torch.autocast("cpu", torch.bfloat16):
        loss = problem.loss()
    with backpack(DiagGGNExact()):
        loss.backward()
    problem.compare("diag_ggn_exact", diagonals)


def test_modules_of_different_precision() -> None:
    model = Net(
        lambda net, x: net.b(net.a(x).double()), a=nn.Linear(3, 4).float(), b=nn.Linear(4, 3)
    )
    problem = classification(model, (3,))
    problem.inputs = (problem.inputs[0].float(),)
    problem.rtol = 1e-5
    problem.check()
