"""The converter: functions become modules, and the network computes what it computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backpack_compat.converter import convert
from backpack_core import backpack, extend
from backpack_core.errors import BackpackWarning, UsageError
from backpack_core.extensions import BatchGrad, DiagHessian
from backpack_layers.modules import ReduceTuple, SumModule
from tests.oracle import assert_close

ONE = (3, 4)
IMAGE = (3, 2, 6, 6)


class Net(nn.Module):
    """A function between two linear maps; kept whole by no tracer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], str]] = {
    "add": (lambda x: x + x.sin(), ONE, "SumModule"),
    "torch.add": (lambda x: torch.add(x, x.sin()), ONE, "SumModule"),
    "x.add": (lambda x: x.add(x.sin()), ONE, "SumModule"),
    "number * x": (lambda x: 2 * x, ONE, "ScaleModule"),
    "x * number": (lambda x: x * 0.1, ONE, "ScaleModule"),
    "x.multiply": (lambda x: x.multiply(3.0), ONE, "ScaleModule"),
    "torch.flatten": (lambda x: torch.flatten(x, 1), IMAGE, "Flatten"),
    "x.flatten": (lambda x: x.flatten(start_dim=2), IMAGE, "Flatten"),
    "permute": (lambda x: x.permute(0, 2, 1, 3), IMAGE, "Permute"),
    "permute tuple": (lambda x: x.permute((0, 3, 2, 1)), IMAGE, "Permute"),
    "torch.permute": (lambda x: torch.permute(x, (0, 2, 3, 1)), IMAGE, "Permute"),
    "transpose": (lambda x: x.transpose(1, 2), IMAGE, "Permute"),
    "torch.transpose": (lambda x: torch.transpose(x, -1, 1), IMAGE, "Permute"),
    "slice": (lambda x: x[:, 1:], ONE, "Slicing"),
    "index": (lambda x: x[:, 1], ONE, "Slicing"),
    "pad": (lambda x: F.pad(x, (1, 2), value=3.0), ONE, "Pad"),
    "pad reflect": (lambda x: F.pad(x, (1, 1), mode="reflect"), ONE, "Pad"),
    "relu": (lambda x: F.relu(x), ONE, "ReLU"),
    "torch.relu": (lambda x: torch.relu(x), ONE, "ReLU"),
    "x.sigmoid": (lambda x: x.sigmoid(), ONE, "Sigmoid"),
    "torch.tanh": (lambda x: torch.tanh(x), ONE, "Tanh"),
    "relu6": (lambda x: F.relu6(x), ONE, "ReLU6"),
    "elu": (lambda x: F.elu(x, 0.5), ONE, "ELU"),
    "selu": (lambda x: F.selu(x), ONE, "SELU"),
    "celu": (lambda x: F.celu(x, alpha=2.0), ONE, "CELU"),
    "leaky_relu": (lambda x: F.leaky_relu(x, negative_slope=0.3), ONE, "LeakyReLU"),
    "hardtanh": (lambda x: F.hardtanh(x, -0.1, 0.2), ONE, "Hardtanh"),
    "logsigmoid": (lambda x: F.logsigmoid(x), ONE, "LogSigmoid"),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), ONE, "GELU"),
    "silu": (lambda x: F.silu(x), ONE, "SiLU"),
    "mish": (lambda x: F.mish(x), ONE, "Mish"),
    "softplus": (lambda x: F.softplus(x, 2.0), ONE, "Softplus"),
    "softsign": (lambda x: F.softsign(x), ONE, "Softsign"),
    "hardswish": (lambda x: F.hardswish(x), ONE, "Hardswish"),
    "softmax": (lambda x: F.softmax(x, dim=1), ONE, "Softmax"),
    "log_softmax": (lambda x: F.log_softmax(x, 1), ONE, "LogSoftmax"),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, stride=1), IMAGE, "MaxPool2d"),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), ONE, "MaxPool1d"),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), IMAGE, "AvgPool2d"),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), IMAGE, "AdaptiveAvgPool2d"),
}


@pytest.mark.filterwarnings("ignore:convert:backpack_core.errors.BackpackWarning")
@pytest.mark.parametrize("name", CASES)
def test_functions(name: str) -> None:
    function, shape, kind = CASES[name]
    x = torch.randn(shape)
    found = convert(Net(function))
    assert kind in [type(m).__name__ for m in found.modules()]
    assert_close(found(x), function(x))
    assert not any(type(m) is nn.Linear for m in found.modules())  # never called


LEFT = {
    "two tensors": lambda x: x * x.sin(),
    "scaled sum": lambda x: torch.add(x, x.sin(), alpha=2),
    "number + x": lambda x: x + 1.0,
    "picks a sample": lambda x: x[0],
    "computed setting": lambda x: F.pad(x, (x.dim(), 0)),
    "mask": lambda x: F.softmax(x, 1, dtype=torch.float32),
    "indices too": lambda x: F.avg_pool2d(x[None], 2, divisor_override=3),
    "dropout that is always on": lambda x: F.dropout(x, 0.0),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_a_function(name: str) -> None:
    x = torch.randn(3, 4)
    with pytest.warns(BackpackWarning, match="stay functions"):
        found = convert(Net(LEFT[name]).eval())
    assert_close(found(x).double(), LEFT[name](x).double())


class InPlace(nn.Module):
    def __init__(self, alias: bool) -> None:
        super().__init__()
        self.alias = alias
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = 2.0 * x
        before = h.view(-1, 4) if self.alias else torch.zeros_like(x)
        h = self.act(h)
        h = h.add_(x)
        return h + before


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.filterwarnings("ignore:convert:backpack_core.errors.BackpackWarning")
def test_in_place(alias: bool) -> None:
    """An alias that is read later sees what was written, before and after."""
    x = torch.randn(3, 4)
    net = InPlace(alias)
    found = convert(net)
    assert_close(found(x), net(x))
    inplace = [m.inplace for m in found.modules() if isinstance(m, nn.ReLU)]
    assert inplace == [alias]
    assert net.act.inplace


OVERWRITTEN: dict[str, Callable[[Tensor], object]] = {
    "method": lambda h: h.mul_(2.0),
    "function": lambda h: F.relu(h, inplace=True),
    "function with a word": lambda h: torch.relu_(h),
    "module": nn.ReLU(inplace=True),
}


@pytest.mark.parametrize("name", OVERWRITTEN)
@pytest.mark.filterwarnings("ignore:convert:backpack_core.errors.BackpackWarning")
def test_statements_that_overwrite(name: str) -> None:
    """Nobody takes what they return."""

    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = OVERWRITTEN[name]

        def forward(self, x: Tensor) -> Tensor:
            h = x + 1.0
            self.act(h)
            return h

    net, x = Overwriting(), torch.randn(3, 4)
    assert_close(convert(net)(x), net(x))


def test_repeated_modules_are_copied() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(4, 4), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.linear(self.act(self.linear(x))))

    net = Repeated()
    found = convert(net)
    assert [name for name, m in found.named_modules() if isinstance(m, nn.Tanh)] == ["act0", "act1"]
    assert list(found.parameters()) == list(net.parameters())


class Named(nn.Module):
    """Names that others would like to have: of functions, and of modules that are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu0, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.flatten, self.part = nn.Flatten(), nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.relu0(self.relu(self.first(self.flatten(x)))))
        h = self.part(self.flatten(F.relu(h))).flatten(1)
        return self.part[1](0.5 * h) + h


def test_modules_are_numbered_as_in_backpack() -> None:
    """What BackPACK 1.7.1 makes of it; it leaves ``F.relu``, which is numbered last here."""
    net = Named()
    found = convert(net)
    names = [str(node.target) for node in found.graph.nodes if node.op == "call_module"]
    assert names == [
        *("flatten1", "first", "relu1", "relu0", "relu2", "relu3", "flatten2"),
        *("part.0", "part.10", "flatten0", "scale_module0", "part.11", "sum_module0"),
    ]
    assert [name for name, _ in found.named_modules()] == [
        *("", *names[:7], "part", *names[7:9], names[11], *names[9:11], names[12])
    ]
    x = torch.randn(3, 4)
    assert_close(found(x), net(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: object) -> None:
        super().__init__()
        self.layer = kind(4, 3, num_layers=2, batch_first=True, **settings)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.layer(x)
        return h[:, -1]


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
def test_layers_of_recurrent_networks(kind: type[nn.RNNBase]) -> None:
    net = Recurrent(kind, dropout=0.5).eval()
    found = convert(net)
    x = torch.randn(2, 5, 4)
    assert_close(found(x), net(x))
    layers = found.layer
    assert isinstance(layers, nn.Sequential)
    assert [type(m) for m in layers] == [kind, ReduceTuple, nn.Dropout, kind]
    assert not layers.training
    assert {id(p) for p in found.parameters()} == {id(p) for p in net.parameters()}
    model, lossfunc = extend(found), extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(x), torch.tensor([0, 2]))
    with backpack(BatchGrad()):
        loss.backward()
    for parameter in net.parameters():
        assert_close(parameter.grad_batch.sum(0), parameter.grad)


def test_recurrent_networks_that_stay_whole() -> None:
    for net in (Recurrent(nn.GRU), Recurrent(nn.RNN, bidirectional=True)):
        assert not isinstance(convert(net).layer, nn.Sequential)


STATES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "of the first layer": lambda rnn, x: rnn(x)[1][0],
    "of all layers": lambda rnn, x: rnn(x)[1].transpose(0, 1).flatten(1),
    "in one of two calls": lambda rnn, x: rnn(x)[0][:, -1] + rnn(2 * x)[1][0],
    "in the other one": lambda rnn, x: rnn(2 * x)[1][0] + rnn(x)[0][:, -1],
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("ignore:convert:backpack_core.errors.BackpackWarning")
def test_states_of_several_layers(name: str) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(4, 3, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return STATES[name](self.rnn, x)

    net, x = Reading(), torch.randn(2, 5, 4)
    assert_close(convert(net)(x), net(x))


def test_the_output_of_several_layers_picked_by_a_module() -> None:
    found = convert(nn.Sequential(nn.LSTM(4, 3, num_layers=2), ReduceTuple()))
    assert isinstance(found.get_submodule("0"), nn.Sequential)


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "twice a size": lambda x: x.view(x.size(0), 2 * x.size(1), 2),
    "sum of sizes": lambda x: x.reshape(x.shape[0] + x.size(1) - 1, 4),
    "sum of shapes": lambda x: x.view(x.shape[:1] + x.shape[1:2] + (2, 2)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_no_tensors(name: str) -> None:
    x = torch.randn(2, 1, 4) if name == "sum of sizes" else torch.randn(2, 3, 4)
    with pytest.warns(BackpackWarning, match=r"functions: (view|reshape)\."):
        found = convert(Net(NUMBERS[name]))
    assert_close(found(x), NUMBERS[name](x))


@pytest.mark.parametrize("how", ["parameter", "mean"])
@pytest.mark.filterwarnings("ignore:convert:backpack_core.errors.BackpackWarning")
def test_sums_of_several_shapes(how: str) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(4, 3), nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h + (self.shift if how == "parameter" else h.mean(-2, keepdim=True))

    net, x, y = Shifted(), torch.randn(5, 2, 4), torch.randn(5, 2, 3)
    model, lossfunc = extend(convert(net)), extend(nn.MSELoss(reduction="sum"))
    with backpack(BatchGrad()):
        lossfunc(model(x), y).backward()
    for parameter in model.parameters():
        for n, found in enumerate(parameter.grad_batch):
            loss = F.mse_loss(net(x[n]), y[n], reduction="sum")
            assert_close(found, torch.autograd.grad(loss, parameter)[0])


def test_states_of_an_lstm() -> None:
    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            _, (h, c) = self.lstm(x)
            return h.transpose(0, 1) + c.transpose(0, 1)

    net, x = States(), torch.randn(2, 5, 4)
    assert_close(convert(net)(x), net(x))


def test_dropout_follows_the_mode() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, training=self.training)

    found = convert(Dropping())
    x = torch.ones(100)
    assert (found(x) == 0).any()
    assert_close(found.eval()(x), x)


def test_second_derivatives_of_a_converted_network() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.silu(self.first(x))
            return self.second(h + 0.5 * x)

    net, lossfunc = Residual(), nn.CrossEntropyLoss()
    x, y = torch.randn(2, 4), torch.tensor([0, 2])

    def loss_of(weight: Tensor) -> Tensor:
        parameters = {**dict(net.named_parameters()), "first.weight": weight}
        return lossfunc(torch.func.functional_call(net, parameters, (x,)), y)

    hessian = torch.autograd.functional.hessian(loss_of, net.first.weight.detach())
    model, loss = extend(convert(net)), extend(lossfunc)
    assert any(isinstance(m, SumModule) for m in model.modules())
    value = loss(model(x), y)
    with backpack(DiagHessian()):
        value.backward()
    diagonal = hessian.reshape(16, 16).diagonal().reshape(4, 4)
    assert_close(net.first.weight.diag_h, diagonal)


def test_debug(logged: list[str]) -> None:
    convert(Net(lambda x: F.relu(x)), debug=True)
    assert "ReLU 'relu0'" in " ".join(logged)


class Looping(nn.Module):
    def forward(self, x: Tensor, steps: int = 2) -> Tensor:
        for _ in range(steps):
            x = torch.tanh(x)
        return x


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("kind", [Looping, Branching])
def test_what_depends_on_values_is_named(kind: type[nn.Module]) -> None:
    with pytest.raises(UsageError, match=f"cannot rewrite {kind.__name__}.*Leave out the conv"):
        convert(kind())
