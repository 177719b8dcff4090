"""Nets, and what may be changed in them between a forward pass and its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cases import Net

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


def uncalled() -> Net:
    """Parameters that a function uses, of parts that are never called."""
    gains = nn.ParameterList([torch.randn(4), torch.randn(4)])
    layers = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 3)}
    return Net(_uncalled, gains=gains, unused=nn.Linear(4, 4, bias=False), **layers)


def _uncalled(net: Any, x: Tensor) -> Tensor:
    h = net.first(x) * net.gains[0] + net.gains[1]
    return net.last(torch.tanh(functional.linear(h, net.unused.weight)))  # type: ignore[no-any-return]


def trained_norm() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(4)
    norm.running_mean, norm.running_var = torch.randn(4), 1.0 + torch.rand(4)
    return norm


REPLACED: dict[str, Case] = {
    "weight": (deep, (3,), replaced("2.weight")),
    "last_weight": (deep, (3,), replaced("4.weight")),
    "bias": (deep, (3,), replaced("2.bias")),
    "all": (deep, (3,), replaced(*(f"{i}.{n}" for i in (0, 2, 4) for n in ("weight", "bias")))),
    "of_parts_never_called": (uncalled, (3,), replaced("gains.0", "gains.1", "unused.weight")),
    "load_state_dict": (deep, (3,), _assigned),
    "module": (deep, (3,), lambda model: model.__setitem__(2, nn.Linear(4, 4))),
    "layer_norm": (between(lambda: nn.LayerNorm(4)), (3,), replaced("1.weight")),
    "group_norm": (between(lambda: nn.GroupNorm(2, 4)), (3,), replaced("1.weight")),
    "batch_norm": (between(trained_norm), (3,), replaced("1.weight")),
    "running_mean": (between(trained_norm), (3,), replaced("1.running_mean")),
    "running_var": (between(trained_norm), (3,), replaced("1.running_var")),
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
    "batch_norm": (between(trained_norm), (3,), settings(eps=3.0)),
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


# Changes in place: the old values may be gone, but then nothing is stored without a word.


def step(*names: str) -> Change:
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
    "step": (deep, (3,), step()),
    "load_state_dict": (
        deep,
        (3,),
        lambda model: model.load_state_dict(deep().state_dict()),
    ),
    "first": (deep, (3,), step("0.weight", "0.bias")),
    "middle": (deep, (3,), step("2.weight")),
    "biases": (deep, (3,), step("0.bias", "2.bias", "4.bias")),
    "layer_norm": (between(lambda: nn.LayerNorm(4)), (3,), step("1.weight")),
    "batch_norm": (between(trained_norm), (3,), step("1.weight")),
    "running_mean": (between(trained_norm), (3,), step("1.running_mean")),
    "running_var": (between(trained_norm), (3,), step("1.running_var")),
    "prelu": (between(nn.PReLU), (3,), step("1.weight")),
    "lstm": (recurrent(nn.LSTM), (2, 2), step("rnn.weight_hh_l0")),
    "lstm_bias": (recurrent(nn.LSTM), (2, 2), step("rnn.bias_hh_l0")),
    "gru_bias": (recurrent(nn.GRU), (2, 2), step("rnn.bias_hh_l0", "rnn.bias_ih_l0")),
    "rnn_bias": (recurrent(nn.RNN), (2, 2), step("rnn.bias_hh_l0")),
    "attention": (attending, (2, 2), step("attention.in_proj_weight")),
    "attention_bias": (attending, (2, 2), step("attention.in_proj_bias")),
    "own": (between(own), (3,), step("1.w")),
    "own_buffer": (between(_scaling), (3,), step("1.factor")),
    "own_setting": (between(_scaling), (3,), settings(power=3.0)),
    "own_new_buffer": (between(_scaling), (3,), replaced("1.factor")),
}
