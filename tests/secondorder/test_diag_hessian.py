"""Diagonals of the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from backpack_core import backpack, extend
from backpack_core.errors import UnsupportedError
from backpack_core.extensions import PCHMP, BatchDiagHessian, DiagHessian
from backpack_core.testing import temporary_plugin
from tests import oracle
from tests.cases import Net, classification
from tests.kit.layers import Power, PowerRule
from tests.secondorder.problems import NETS, SETTINGS, hessians, make
from tests.waits import Reads


def diagonals(blocks: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
    pairs = zip(blocks, shapes, strict=True)
    return [block.diagonal(dim1=1, dim2=2).reshape(-1, *shape) for block, shape in pairs]


@pytest.mark.parametrize(("batch", "reduction", "loss"), SETTINGS)
@pytest.mark.parametrize("net", NETS)
def test_exact(net: str, batch: int, reduction: str, loss: str) -> None:
    problem = make(net, batch, reduction, loss)
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    problem.run(DiagHessian(), BatchDiagHessian())
    problem.compare("diag_h", [d.sum(0) for d in expected])
    problem.compare("diag_h_batch", expected)


def test_subsampling_keeps_the_scale() -> None:
    for net in ("convolutions", "residual"):
        problem = make(net)
        problem.run(BatchDiagHessian())
        everything = problem.fields("diag_h_batch")
        problem.run(BatchDiagHessian(subsampling=[2, 0]), DiagHessian(subsampling=[2, 0]))
        problem.compare("diag_h_batch", [d[[2, 0]] for d in everything])
        problem.compare("diag_h", [d[[2, 0]].sum(0) for d in everything])


def test_negative_loss() -> None:
    """An indefinite loss Hessian has no real root; its eigenvalues have signs."""
    problem = make("mlp")
    extend(problem.model), extend(problem.lossfunc)
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    loss = -0.5 * problem.loss()
    with backpack(DiagHessian()):
        loss.backward()
    problem.compare("diag_h", [-0.5 * d.sum(0) for d in expected])


CONVEX: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "classes": lambda: (nn.CrossEntropyLoss(), torch.tensor([0, 2, 1, 1])),
    "smoothed": lambda: (nn.CrossEntropyLoss(label_smoothing=0.3), torch.tensor([0, 2, -100, 1])),
    "squares": lambda: (nn.MSELoss(), torch.randn(4, 3)),
    "Huber": lambda: (nn.HuberLoss(), torch.randn(4, 3)),
    "smooth": lambda: (nn.SmoothL1Loss(), torch.randn(4, 3)),
    "Poisson": lambda: (nn.PoissonNLLLoss(), -torch.rand(4, 3)),
    "logistic": lambda: (nn.BCEWithLogitsLoss(), torch.randn(4, 3)),
    "margin": lambda: (nn.SoftMarginLoss(), torch.randn(4, 3)),
    "labels": lambda: (nn.MultiLabelSoftMarginLoss(), torch.randn(4, 3)),
    "Gauss": lambda: (Gaussian(), torch.randn(4, 3)),
}


class Gaussian(nn.Module):
    """Its module takes a third argument."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.GaussianNLLLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(x, target, target.square())  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"subsampling": [2, 0, 2]}], ids=str)
@pytest.mark.parametrize("name", CONVEX)
def test_a_convex_loss_whose_factor_changes_its_sign(name: str, options: dict[str, Any]) -> None:
    """No pass looks at the sign, however weights and targets are."""
    problem = make("mlp")
    problem.lossfunc, problem.target = CONVEX[name]()
    chosen = options.get("subsampling", range(4))
    blocks = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    expected = [block[[*chosen]] for block in blocks]
    extend(problem.model), extend(problem.lossfunc)
    for factor in (1.0, -0.5, 2.0, -3.0):
        loss = factor * problem.loss()
        extensions = DiagHessian(**options), BatchDiagHessian(**options)
        with Reads() as found, backpack(*extensions, check="never"):
            loss.backward()
        assert not found.found
        problem.compare("diag_h", [factor * d.sum(0) for d in expected])
        problem.compare("diag_h_batch", [factor * d for d in expected])


def test_a_sign_where_samples_have_several_rows() -> None:
    torch.manual_seed(0)
    layers = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 3)}
    model = extend(
        Net(lambda net, x: net.b((net.a(x) + net.a.bias).tanh().flatten(0, 1)), **layers)
    )
    lossfunc, x, y = extend(nn.CrossEntropyLoss()), torch.randn(4, 2, 3), torch.arange(8) % 3
    found = []
    for factor in (1.0, -0.5):
        with backpack(BatchDiagHessian()):
            (factor * lossfunc(model(x), y)).backward()
        found.append([p.diag_h_batch / factor for p in model.parameters()])
    for plain, turned in zip(*found, strict=True):
        oracle.assert_close(turned, plain)


def test_two_losses() -> None:
    problem = make("mlp")
    model, (x,), labels, other = problem.model, problem.inputs, problem.target, nn.MSELoss()
    shapes = [p.shape for p in problem.parameters]
    one = diagonals(problem.expected(hessians), shapes)
    problem.lossfunc, problem.target = other, torch.randn(4, 3)
    two = diagonals(problem.expected(hessians), shapes)
    extend(model), extend(other)
    first = extend(nn.CrossEntropyLoss())
    output = model(x)
    with backpack(BatchDiagHessian()):
        (first(output, labels) - other(output, problem.target)).backward()
    problem.compare("diag_h_batch", [a - b for a, b in zip(one, two, strict=True)])


def test_linear_operations_between_modules() -> None:
    scale = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.t(net.a(x)) * scale / 2
        h = torch.cat([F.relu(h), h.flip(1)[:, :2]], 1) - net.a.bias.detach().sum()
        return net.b(h.view(len(x), 1, 5).transpose(1, 2).mean(2))

    net = Net(forward, a=nn.Linear(3, 3), t=nn.Tanh(), b=nn.Linear(5, 3))
    problem = classification(net, (3,))
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    problem.run(BatchDiagHessian())
    problem.compare("diag_h_batch", expected)


def _branches(net: Net, x: Tensor) -> Tensor:
    """One layer at two tensors, which meet behind nonlinear modules."""
    return net.last(net.t(net.a(x)) + net.s(net.a(net.t(2 * x))))  # type: ignore[no-any-return]


def _tokens_and_mean(net: Net, x: Tensor) -> Tensor:
    tokens = net.t(net.a(x.unsqueeze(1) * torch.arange(1.0, 4.0).reshape(1, 3, 1)))
    return net.last(net.s(net.a(x)) + tokens.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("forward", [_branches, _tokens_and_mean])
def test_parameter_of_several_branches(
    forward: Callable[[Net, Tensor], Tensor], size: int | None
) -> None:
    parts = {"a": nn.Linear(3, 3), "last": nn.Linear(3, 3), "t": nn.Tanh(), "s": nn.Sigmoid()}
    problem = classification(Net(forward, **parts), (3,))
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    problem.run(DiagHessian(chunk_size=size), BatchDiagHessian(chunk_size=size))
    problem.compare("diag_h", [d.sum(0) for d in expected])
    problem.compare("diag_h_batch", expected)


def test_parameter_used_twice_in_a_row() -> None:
    """The loss has second derivatives in both uses together, which are not carried."""
    net = Net(lambda net, x: net.a(net.t(net.a(x))), a=nn.Linear(3, 3), t=nn.Tanh())
    for extension in (DiagHessian(), BatchDiagHessian()):
        with pytest.raises(UnsupportedError, match="is used again on the way to its own use"):
            classification(net, (3,)).run(extension)


def test_activation_used_twice_is_fine() -> None:
    parts = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "t": nn.Tanh()}
    problem = classification(Net(lambda net, x: net.t(net.b(net.t(net.a(x)))), **parts), (3,))
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    problem.run(BatchDiagHessian())
    problem.compare("diag_h_batch", expected)


def test_parameters_that_enter_nonlinearly() -> None:
    net = Net(lambda net, x: net.last(net.rnn(x)[0][:, -1]), rnn=nn.RNN(2, 3, batch_first=True),
              last=nn.Linear(3, 3))  # fmt: skip
    with pytest.raises(UnsupportedError, match="second derivative"):
        classification(net, (4, 2)).run(DiagHessian())


def test_nonlinear_in_two_inputs() -> None:
    parts = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2), "bilinear": nn.Bilinear(2, 2, 3)}
    net = Net(lambda net, x: net.bilinear(net.a(x), net.b(x)), **parts)
    with pytest.raises(UnsupportedError, match="nonlinear in 2 inputs at once"):
        classification(net, (3,)).run(DiagHessian())


def test_nonlinear_in_an_input_behind_the_first() -> None:
    """A rule's second derivative is that in the first input, here a constant."""
    net = Net(lambda net, x: net.power(torch.ones_like(x), net.a(x)), a=nn.Linear(3, 3),
              power=Power())  # fmt: skip
    for extension in (DiagHessian(), PCHMP()):
        with (
            temporary_plugin(PowerRule),
            pytest.raises(UnsupportedError, match="nonlinear in its input 1"),
        ):
            classification(net, (3,)).run(extension)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_activation_of_a_number_for_each_sample(activation: type[nn.Module]) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.last(net.t(net.a(x).squeeze(1)).unsqueeze(1))

    problem = classification(
        Net(forward, a=nn.Linear(3, 1), t=activation(), last=nn.Linear(1, 3)), (3,)
    )
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    problem.run(DiagHessian(), BatchDiagHessian())
    problem.compare("diag_h", [d.sum(0) for d in expected])
    problem.compare("diag_h_batch", expected)


def test_nothing_is_collected_where_branches_meet_again() -> None:
    """Columns that went two ways are added before they are squared, however many there are."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.t(net.a(x))
        for layer in (net.b, net.c, net.d):
            h = h + net.t(layer(net.t(layer.weight.detach() @ h.unsqueeze(-1))[..., 0]))
        return net.last(h)

    parts = {name: nn.Linear(2, 2) for name in "abcd"}
    problem = classification(Net(forward, **parts, t=nn.Tanh(), last=nn.Linear(2, 3)), (2,))
    expected = diagonals(problem.expected(hessians), [p.shape for p in problem.parameters])
    problem.run(BatchDiagHessian())
    problem.compare("diag_h_batch", expected)
    oracle.assert_close(problem.parameters[0].diag_h_batch, expected[0])


@pytest.mark.parametrize("kind", [DiagHessian, BatchDiagHessian])
def test_it_crosses_what_hands_on(kind: type) -> None:
    """Hooks of a module have a node of their own, which changes nothing."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    model, lossfunc = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(5, 3)), nn.CrossEntropyLoss()
    extend(model), extend(lossfunc)
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    found, seen = [], []
    for _ in range(2):
        with backpack(kind()):
            lossfunc(model(x), y).backward()
        found.append([getattr(p, kind.savefield) for p in model.parameters()])
        inner.register_full_backward_hook(lambda *_: seen.append(1))
    assert len(seen) == 1
    for one, other in zip(*found, strict=True):
        oracle.assert_close(one, other)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.RNN, {}), (nn.GRU, {"bidirectional": True}), (nn.LSTM, {"bidirectional": True}),
        (nn.LSTM, {"proj_size": 2}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("without_cudnn")
def test_a_frozen_recurrent_layer(kind: Any, options: dict[str, Any], layers: int) -> None:
    """Behind a trained layer, its own second derivative counts; its output and states are used."""

    def forward(net: Any, x: Tensor) -> Tensor:
        output, states = net.recurrent(net.first(x).sin())
        states = states if isinstance(states, tuple) else (states,)
        return net.head(torch.cat([output[:, 0], *[state[-1] for state in states]], 1))

    recurrent = kind(3, 3, layers, batch_first=True, **options).requires_grad_(False)
    head = nn.LazyLinear(2)
    net = Net(forward, first=nn.Linear(2, 3), recurrent=recurrent, head=head).double()
    x, y = torch.randn(3, 4, 2).double(), torch.randint(2, (3,))
    net(x)
    lossfunc = extend(nn.CrossEntropyLoss())
    with backpack(DiagHessian()):
        lossfunc(extend(net)(x), y).backward()
    for name in ("first.weight", "first.bias", "head.weight"):
        parameter = net.get_parameter(name)

        def loss(value: Tensor, name: str = name) -> Tensor:
            found: Tensor = lossfunc(functional_call(net, {name: value}, (x,)), y)
            return found

        whole: Any = torch.autograd.functional.hessian(loss, parameter.detach())
        diagonal = whole.reshape(parameter.numel(), -1).diagonal().reshape(parameter.shape)
        oracle.assert_close(vars(parameter)["diag_h"], diagonal)
