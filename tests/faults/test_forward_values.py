"""Changes between a forward pass and its backward pass: the values of the forward pass count."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

from backpack_core import backpack, extend, unextend
from backpack_core.errors import BackpackError, UnsupportedError
from backpack_core.extensions import GGNMP, HMP, GGNGram
from tests import oracle
from tests.cases import Net, Problem, classification
from tests.faults.problems import KINDS, Expectation, expect

pytestmark = pytest.mark.filterwarnings("ignore::backpack_core.errors.AutodiffFallbackWarning")

Change = Callable[[Any], object]
Case = tuple[Callable[[], nn.Module], tuple[int, ...], Change]


def replaced(*names: str) -> Change:
    """New parameters or buffers of the same shapes."""

    def change(model: nn.Module) -> None:
        for name in names:
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            before = getattr(module, last)
            if isinstance(before, nn.Parameter):
                setattr(module, last, nn.Parameter(torch.randn_like(before)))
            else:
                setattr(module, last, 1.0 + torch.rand_like(before))

    return change


def settings(**values: Any) -> Change:
    """Attributes of the module in the middle."""

    def change(model: nn.Module) -> None:
        for name, value in values.items():
            setattr(model.get_submodule("1"), name, value)

    return change


def _assigned(model: nn.Module) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def deep() -> nn.Sequential:
    """Three linear layers."""
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)]
    return nn.Sequential(*layers)


def between(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A layer of four features between two linear layers, in eval mode."""
    return lambda: nn.Sequential(nn.Linear(3, 4), layer(), nn.Linear(4, 3)).eval()


def on_signals(layer: Callable[[], nn.Module], features: int) -> Callable[[], nn.Module]:
    """A layer between a convolution and a linear layer."""
    return lambda: nn.Sequential(
        nn.Conv1d(2, 2, 1), layer(), nn.Flatten(), nn.Linear(features, 3)
    ).eval()


def _recurrent(net: Any, x: Tensor) -> Tensor:
    return net.last(net.rnn(net.first(x))[0].flatten(1))  # type: ignore[no-any-return]


def _attending(net: Any, x: Tensor) -> Tensor:
    tokens = net.first(x)
    attended = net.attention(tokens, tokens, tokens, need_weights=False)[0]
    return net.last(attended.flatten(1))  # type: ignore[no-any-return]


def recurrent(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    """A recurrent layer between two linear layers."""
    return lambda: Net(
        _recurrent, first=nn.Linear(2, 2), rnn=kind(2, 2, batch_first=True), last=nn.Linear(4, 3)
    )


def attending() -> Net:
    """An attention layer between two linear layers."""
    attention = nn.MultiheadAttention(2, 2, batch_first=True)
    return Net(_attending, first=nn.Linear(2, 2), attention=attention, last=nn.Linear(4, 3))


def own() -> Net:
    """A module without a rule, with a parameter."""
    return Net(lambda net, x: torch.tanh(x * net.w), w=nn.Parameter(torch.randn(4)))


def _trained_norm() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(4)
    norm.running_mean, norm.running_var = torch.randn(4), 1.0 + torch.rand(4)
    return norm


REPLACED: dict[str, Case] = {
    "weight": (deep, (3,), replaced("2.weight")),
    "last_weight": (deep, (3,), replaced("4.weight")),
    "bias": (deep, (3,), replaced("2.bias")),
    "all": (deep, (3,), replaced(*(f"{i}.{n}" for i in (0, 2, 4) for n in ("weight", "bias")))),
    "load_state_dict": (deep, (3,), _assigned),
    "module": (deep, (3,), lambda model: model.__setitem__(2, nn.Linear(4, 4))),
    "layer_norm": (between(lambda: nn.LayerNorm(4)), (3,), replaced("1.weight")),
    "group_norm": (between(lambda: nn.GroupNorm(2, 4)), (3,), replaced("1.weight")),
    "batch_norm": (between(_trained_norm), (3,), replaced("1.weight")),
    "running_mean": (between(_trained_norm), (3,), replaced("1.running_mean")),
    "running_var": (between(_trained_norm), (3,), replaced("1.running_var")),
    "prelu": (between(nn.PReLU), (3,), replaced("1.weight")),
    "convolution": (on_signals(lambda: nn.Conv1d(2, 2, 2), 4), (2, 3), replaced("1.weight")),
    "transposed": (
        on_signals(lambda: nn.ConvTranspose1d(2, 2, 2), 8),
        (2, 3),
        replaced("1.weight"),
    ),
    "lstm": (recurrent(nn.LSTM), (2, 2), replaced("rnn.weight_hh_l0")),
    "gru": (recurrent(nn.GRU), (2, 2), replaced("rnn.weight_ih_l0", "rnn.weight_hh_l0")),
    "rnn": (recurrent(nn.RNN), (2, 2), replaced("rnn.weight_hh_l0")),
    "attention": (attending, (2, 2), replaced("attention.in_proj_weight")),
    "attention_output": (attending, (2, 2), replaced("attention.out_proj.weight")),
    "own": (between(own), (3,), replaced("1.w")),
}

SETTINGS: dict[str, Case] = {
    "layer_norm": (between(lambda: nn.LayerNorm(4)), (3,), settings(eps=1.0)),
    "group_norm": (between(lambda: nn.GroupNorm(2, 4)), (3,), settings(eps=1.0)),
    "groups": (between(lambda: nn.GroupNorm(2, 4)), (3,), settings(num_groups=1)),
    "batch_norm": (between(_trained_norm), (3,), settings(eps=3.0)),
    "leaky_relu": (between(lambda: nn.LeakyReLU(0.3)), (3,), settings(negative_slope=0.9)),
    "elu": (between(lambda: nn.ELU(0.7)), (3,), settings(alpha=0.1)),
    "celu": (between(lambda: nn.CELU(0.7)), (3,), settings(alpha=0.1)),
    "softplus": (between(lambda: nn.Softplus(0.7)), (3,), settings(beta=5.0)),
    "hardtanh": (between(lambda: nn.Hardtanh(-0.3, 0.3)), (3,), settings(max_val=0.01)),
    "gelu": (between(nn.GELU), (3,), settings(approximate="tanh")),
    "softshrink": (between(lambda: nn.Softshrink(0.1)), (3,), settings(lambd=0.6)),
    "threshold": (between(lambda: nn.Threshold(0.1, 0.2)), (3,), settings(threshold=-0.3)),
    "dilation": (
        on_signals(lambda: nn.Conv1d(2, 2, 2, dilation=2), 4),
        (2, 4),
        settings(dilation=(1,)),
    ),
    "padding": (
        on_signals(lambda: nn.Conv1d(2, 2, 2, padding=1), 8),
        (2, 3),
        settings(padding=(0,)),
    ),
    "pooling": (on_signals(lambda: nn.AvgPool1d(2), 4), (2, 4), settings(kernel_size=(4,))),
    "maxima": (on_signals(lambda: nn.MaxPool1d(2), 4), (2, 4), settings(kernel_size=4)),
    "upsampling": (
        on_signals(lambda: nn.Upsample(scale_factor=2.0), 12),
        (2, 3),
        settings(scale_factor=3.0),
    ),
    "flatten": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.Flatten(), nn.Linear(4, 3)),
        (2, 2),
        settings(start_dim=2),
    ),
}


def check_change(problem: Problem, kind: str, change: Change, on_loss: bool = False) -> None:
    """A change between the passes makes no difference; what came in gets nothing."""
    expectation = expect(problem.expected, kind)
    used = problem.parameters
    loss = problem.loss()
    change(problem.lossfunc if on_loss else problem.model)
    with backpack(*expectation.extensions):
        loss.backward()
    expectation.compare(used, problem.rtol)
    known = {id(p) for p in used}
    expectation.absent(p for p in problem.model.parameters() if id(p) not in known)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REPLACED)
def test_replaced(name: str, kind: str) -> None:
    make, shape, change = REPLACED[name]
    check_change(classification(make(), shape), kind, change)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, kind: str) -> None:
    make, shape, change = SETTINGS[name]
    problem = classification(make(), shape)
    if name == "celu":  # autograd computes it with 1 / alpha in single precision
        problem.rtol = 1e-7
    check_change(problem, kind, change)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("layer", [nn.Dropout, nn.AlphaDropout, nn.Dropout1d])
def test_probability_of_dropout(layer: Any, p: float, kind: str) -> None:
    layers = [nn.Conv1d(2, 4, 1), nn.Tanh(), layer(0.4), nn.Flatten(), nn.Linear(8, 3)]
    problem = classification(nn.Sequential(*layers), (2, 2))
    problem.whole = True
    check_change(problem, kind, lambda model: setattr(model[2], "p", p))


def _weighted(reduction: str = "mean") -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.0]), reduction=reduction)


LOSSES: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "reduction": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "reduction", "sum")),
    "weight": (_weighted, lambda loss: setattr(loss, "weight", torch.ones(3))),
    "label_smoothing": (
        lambda: nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda loss: setattr(loss, "label_smoothing", 0.0),
    ),
    "ignore_index": (
        lambda: nn.CrossEntropyLoss(ignore_index=0),
        lambda loss: setattr(loss, "ignore_index", -100),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_settings_of_the_loss(name: str, kind: str) -> None:
    make, change = LOSSES[name]
    problem = classification(deep(), (3,))
    problem.lossfunc, problem.target = make(), torch.tensor([0, 1, 2])
    check_change(problem, kind, change, on_loss=True)


@pytest.mark.parametrize("kind", KINDS)
def test_squares_summed_or_averaged(kind: str) -> None:
    problem = classification(deep(), (3,))
    problem.lossfunc, problem.target = nn.MSELoss(), torch.randn(3, 3)
    check_change(problem, kind, lambda loss: setattr(loss, "reduction", "sum"), on_loss=True)


# Changes in place: the old values may be gone, but then nothing is stored without a word.


def _step(*names: str) -> Change:
    def change(model: nn.Module) -> None:
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for name in names or dict(model.named_parameters()):
                tensors[name].add_(torch.rand_like(tensors[name]))

    return change


def _scaling() -> Net:
    """A module without a rule, with a buffer and a setting."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.tanh(x * net.w * net.power) * net.factor  # type: ignore[no-any-return]

    net = Net(forward, w=nn.Parameter(torch.randn(4)))
    net.register_buffer("factor", torch.randn(4))
    net.power = 2.0  # type: ignore[assignment]
    return net


CHANGED: dict[str, Case] = {
    "step": (deep, (3,), _step()),
    "load_state_dict": (
        deep,
        (3,),
        lambda model: model.load_state_dict(deep().state_dict()),
    ),
    "first": (deep, (3,), _step("0.weight", "0.bias")),
    "middle": (deep, (3,), _step("2.weight")),
    "biases": (deep, (3,), _step("0.bias", "2.bias", "4.bias")),
    "layer_norm": (between(lambda: nn.LayerNorm(4)), (3,), _step("1.weight")),
    "batch_norm": (between(_trained_norm), (3,), _step("1.weight")),
    "running_mean": (between(_trained_norm), (3,), _step("1.running_mean")),
    "running_var": (between(_trained_norm), (3,), _step("1.running_var")),
    "prelu": (between(nn.PReLU), (3,), _step("1.weight")),
    "lstm": (recurrent(nn.LSTM), (2, 2), _step("rnn.weight_hh_l0")),
    "lstm_bias": (recurrent(nn.LSTM), (2, 2), _step("rnn.bias_hh_l0")),
    "gru_bias": (recurrent(nn.GRU), (2, 2), _step("rnn.bias_hh_l0", "rnn.bias_ih_l0")),
    "rnn_bias": (recurrent(nn.RNN), (2, 2), _step("rnn.bias_hh_l0")),
    "attention": (attending, (2, 2), _step("attention.in_proj_weight")),
    "attention_bias": (attending, (2, 2), _step("attention.in_proj_bias")),
    "own": (between(own), (3,), _step("1.w")),
    "own_buffer": (between(_scaling), (3,), _step("1.factor")),
    "own_setting": (between(_scaling), (3,), settings(power=3.0)),
    "own_new_buffer": (between(_scaling), (3,), replaced("1.factor")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGED)
def test_exact_or_refused(name: str, kind: str) -> None:
    make, shape, change = CHANGED[name]
    with suppress(BackpackError, RuntimeError):
        check_change(classification(make(), shape), kind, change)


# Products and eigenvectors that are asked for after the pass.


@pytest.mark.parametrize("name", REPLACED)
def test_products_after_a_replacement(name: str) -> None:
    make, shape, change = REPLACED[name]
    problem = classification(make(), shape)
    blocks = [block.sum(0) for block in problem.expected(oracle.ggn)]
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        problem.run(GGNMP())
    used = problem.parameters
    change(problem.model)
    for p, block in zip(used, blocks, strict=True):
        vectors = torch.randn(2, *p.shape)
        expected = (vectors.flatten(1) @ block).reshape(vectors.shape)
        oracle.assert_close(p.ggnmp(vectors), expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "softplus", "elu"])
def test_products_after_a_change_of_settings(name: str) -> None:
    make, shape, change = SETTINGS[name]
    problem = classification(make(), shape)
    problem.run(GGNMP(), HMP())
    pairs = [(p, torch.randn(2, *p.shape)) for p in problem.parameters]
    before = [(p.ggnmp(v), p.hmp(v)) for p, v in pairs]  # type: ignore[attr-defined]
    change(problem.model)
    for (p, vectors), (ggn, hessian) in zip(pairs, before, strict=True):
        oracle.assert_close(p.ggnmp(vectors), ggn)  # type: ignore[attr-defined]
        oracle.assert_close(p.hmp(vectors), hessian)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["step", "lstm", "attention", "layer_norm", "own"])
def test_eigenvectors_after_a_step(name: str) -> None:
    """Exact, or an error."""
    make, shape, _ = CHANGED[name]
    problem = classification(make(), shape)
    problem.run(GGNGram())
    with torch.no_grad():
        before = [p.ggn_gram.eigenvectors(2) for p in problem.parameters]  # type: ignore[attr-defined]
        _step()(problem.model)
        for p, expected in zip(problem.parameters, before, strict=True):
            try:
                found = p.ggn_gram.eigenvectors(2)  # type: ignore[attr-defined]
            except (BackpackError, RuntimeError):
                continue
            oracle.assert_close(found, expected)


# Weights that are drawn anew whenever they are read.


class Noise(nn.Module):
    """Scales every entry at random."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.rand_like(weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("index", [0, 2, 4])
def test_random_parametrization(index: int, trained: bool, kind: str) -> None:
    """Exact, or refused."""
    model = deep()
    parametrize.register_parametrization(model[index], "weight", Noise())
    model[index].parametrizations.weight.original.requires_grad_(trained)
    problem = classification(model, (3,))
    problem.whole = True
    expectation = expect(problem.expected, kind)
    try:
        problem.run(*expectation.extensions)
    except UnsupportedError:
        return
    expectation.compare(problem.parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_spectral_norm_in_train_mode(kind: str) -> None:
    """Each reading takes a step of its power iteration."""
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    layer.parametrizations.weight.original.requires_grad_(False)
    problem = classification(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 3)), (3,))
    problem.whole = True
    expectation = expect(problem.expected, kind)
    try:
        problem.run(*expectation.extensions)
    except UnsupportedError:
        return
    expectation.compare(problem.parameters)


# Calls with other tensors in the place of the parameters.


def compare_call(problem: Problem, tensors: dict[str, Tensor], kind: str) -> None:
    """One pass with ``tensors`` as parameters and buffers, compared on these."""
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    expectation = expect_of_call(problem, tensors, kind)
    loss = lossfunc(functional_call(model, tensors, problem.inputs), problem.target)
    with backpack(*expectation.extensions):
        loss.backward()
    expectation.compare(trained(tensors))
    expectation.absent(unused(problem, tensors))


def trained(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Those that want a gradient, each once."""
    return list({id(t): t for t in tensors.values() if t.requires_grad}.values())


def unused(problem: Problem, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The parameters that a call with other tensors does not see."""
    return [p for name, p in problem.model.named_parameters() if name in tensors]


def expect_of_call(problem: Problem, tensors: dict[str, Tensor], kind: str) -> Expectation:
    """By autograd, with the same tensors in an untouched copy of the model."""

    def compute(quantity: Callable[..., Tensor]) -> list[Tensor]:
        model = unextend(copy.deepcopy(problem.model))
        arguments = (
            lambda x: functional_call(model, tensors, (x,)),
            lambda out: F.cross_entropy(out, problem.target),
            problem.inputs,
        )
        return [quantity(*arguments, tensor) for tensor in trained(tensors)]

    return expect(compute, kind)


def fast_weights(model: nn.Module, kind: str, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Tensors in the place of parameters: leaves, or results of a computation."""
    chosen = {n: p for n, p in model.named_parameters() if not names or n in names}
    drawn = {n: torch.randn_like(p) for n, p in chosen.items()}
    if kind == "leaves":
        return {n: tensor.requires_grad_() for n, tensor in drawn.items()}
    return {n: p - 0.5 * drawn[n] for n, p in chosen.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", ["leaves", "results"])
@pytest.mark.parametrize(
    "name", ["all", "layer_norm", "lstm", "own", "attention", "prelu", "convolution"]
)
def test_functional_call(name: str, made: str, kind: str) -> None:
    make, shape, _ = REPLACED[name]
    problem = classification(make(), shape)
    compare_call(problem, fast_weights(problem.model, made), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", ["leaves", "results"])
def test_functional_call_with_some_parameters(made: str, kind: str) -> None:
    """The others are used as they are, and get their quantities."""
    problem = classification(deep(), (3,))
    some = fast_weights(problem.model, made, ["2.weight", "4.bias"])
    everything = {**dict(problem.model.named_parameters()), **some}
    expectation = expect_of_call(problem, everything, kind)
    extend(problem.model), extend(problem.lossfunc)
    loss = problem.lossfunc(functional_call(problem.model, some, problem.inputs), problem.target)
    with backpack(*expectation.extensions):
        loss.backward()
    if made == "results":
        expectation.fields.pop("grad")  # that of the model's own weights has two parts
    expectation.compare(trained(everything))
    expectation.absent(unused(problem, some))


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_with_buffers(kind: str) -> None:
    problem = classification(between(_trained_norm)(), (3,))
    tensors = fast_weights(problem.model, "leaves")
    tensors["1.running_mean"], tensors["1.running_var"] = torch.randn(4), 2.0 + torch.rand(4)
    compare_call(problem, tensors, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_with_a_tied_weight(kind: str) -> None:
    """One tensor for two modules."""
    parts = {"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)}
    problem = classification(Net(lambda net, x: net.b(torch.tanh(net.a(x))), **parts), (3,))
    shared = torch.randn(3, 3, requires_grad=True)
    compare_call(problem, {"a.weight": shared, "b.weight": shared}, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_inner_loop(steps: int, kind: str) -> None:
    """Fast weights by some steps of gradient descent, whose own gradients are constants."""
    problem = classification(deep(), (3,))
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    tensors = dict(model.named_parameters())
    support, answers = torch.randn(5, 3), torch.randint(0, 3, (5,))
    for _ in range(steps):
        loss = lossfunc(functional_call(model, tensors, (support,)), answers)
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        pairs = zip(tensors.items(), gradients, strict=True)
        tensors = {name: tensor - 0.5 * g for (name, tensor), g in pairs}
    compare_call(problem, tensors, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_inner_loop_that_is_differentiated(kind: str) -> None:
    """The inner gradient belongs to the graph: exact on the fast weights, or refused."""
    problem = classification(deep(), (3,))
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    own = dict(model.named_parameters())
    loss = lossfunc(model(torch.randn(5, 3)), torch.randint(0, 3, (5,)))
    gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    pairs = zip(own.items(), gradients, strict=True)
    fast = {name: p - 0.5 * g for (name, p), g in pairs}
    detached = {name: tensor.detach().requires_grad_() for name, tensor in fast.items()}
    expectation = expect_of_call(problem, detached, kind)
    loss = lossfunc(functional_call(model, fast, problem.inputs), problem.target)
    try:
        with backpack(*expectation.extensions):
            loss.backward()
    except BackpackError:
        return
    expectation.compare(fast.values())
    expectation.absent(own.values())


@pytest.mark.parametrize("kind", KINDS)
def test_several_tasks_in_one_pass(kind: str) -> None:
    """Each has weights of its own, and a loss of its own."""
    problem = classification(deep(), (3,))
    other = classification(problem.model, (3,))
    tasks = [(p, fast_weights(problem.model, "results")) for p in (problem, other)]
    expectations = [expect_of_call(p, tensors, kind) for p, tensors in tasks]
    model, lossfunc = extend(problem.model), extend(problem.lossfunc)
    losses = [lossfunc(functional_call(model, t, p.inputs), p.target) for p, t in tasks]
    with backpack(*expectations[0].extensions):
        torch.stack(losses).sum().backward()
    for expectation, (_, tensors) in zip(expectations, tasks, strict=True):
        expectation.fields.pop("grad_clipped", None)  # its norm is one over both tasks
        expectation.compare(tensors.values())
        expectation.absent(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_call_with_other_tensors_after_one_of_the_model_itself(kind: str) -> None:
    """What the first stored is no value of the second."""
    problem = classification(deep(), (3,))
    own = expect(problem.expected, kind)
    problem.run(*own.extensions)
    own.compare(problem.parameters)
    problem.model.zero_grad()
    compare_call(problem, fast_weights(problem.model, "leaves"), kind)
