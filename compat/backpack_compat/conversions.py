"""The module for a function or method in a network that is rewritten. Imports helper modules."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn import Module
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from backpack_layers.modules import (
    Pad,
    Permute,
    ReduceTuple,
    ScaleModule,
    Slicing,
    SumModule,
    moves_samples,
)

# Operations that overwrite their first argument, whatever their settings.
IN_PLACE = frozenset({operator.iadd, operator.imul})

# The module for a node and the inputs that it takes; None if there is no module.
Conversion = tuple[Module, tuple[Any, ...]] | None
Convert = Callable[[Node], Conversion]


def converted(node: Node) -> Conversion:
    """The module that does what a node of an ``fx`` graph does.

    Args:
        node: A function or method call.

    Returns:
        The module and its inputs, or ``None`` if the node must stay: there is no module, it
        computes with numbers or takes its settings from them, or it overwrites a tensor that is
        read elsewhere.
    """
    key = node.target if node.op == "call_function" else str(node.target)
    if key not in _CONVERSIONS or any(map(is_number, node.all_input_nodes)):
        return None
    if overwrites(node) and not is_only_reader(node):
        return None
    return _CONVERSIONS[key](node)


def overwrites(node: Node) -> bool:
    """Whether a node changes what it receives, as ``h.mul_(2)`` does."""
    if node.op == "call_module":
        return bool(getattr(_root(node).get_submodule(str(node.target)), "inplace", False))
    name = str(getattr(node.target, "__name__", node.target))
    has_word = name.endswith("_") and not name.endswith("__")
    return node.target in IN_PLACE or has_word or bool(node.kwargs.get("inplace", False))


def is_number(node: Node) -> bool:
    """Whether a node is a number, or several, computed from shapes: ``2 * x.shape[1]``."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    if getattr(node.target, "__module__", None) not in ("_operator", "math", "builtins"):
        return False
    return bool(node.all_input_nodes) and all(map(is_number, node.all_input_nodes))


def is_only_reader(node: Node) -> bool:
    """Whether nothing else reads the memory of a node's first argument.

    Unless a module is known to return a new tensor, its output may be a view of its input.
    """
    source = node.args[0] if node.args else None
    while isinstance(source, Node):
        if len(source.users) > 1:
            return False
        if _makes_new_tensor(source):
            return True
        source = source.args[0] if source.args else None
    return True


def _makes_new_tensor(node: Node) -> bool:
    if node.op != "call_module":
        return False
    module = _root(node).get_submodule(str(node.target))
    if isinstance(module, _DropoutNd):
        return False
    if isinstance(module, (ScaleModule, SumModule)):
        return True
    return bool(module._parameters) or not getattr(module, "inplace", True)


def _root(node: Node) -> Module:
    root = node.graph.owning_module
    assert root is not None
    return root


def _bind(node: Node, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The settings that a node was called with, by name; ``None`` if they are not constants."""
    positional = node.args[1:]
    if len(positional) > len(names) or not node.args or not isinstance(node.args[0], Node):
        return None
    settings = dict(zip(names, positional, strict=False)) | dict(node.kwargs)
    if set(settings) - set(names) or _holds_node(list(settings.values())):
        return None
    return settings


def _holds_node(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_node(item) for item in value)
    if isinstance(value, slice):
        return _holds_node([value.start, value.stop, value.step])
    return isinstance(value, Node)


def _module(kind: Callable[..., Module], *names: str) -> Convert:
    """Settings of the function are those of the module; in-place variants become ordinary ones."""

    def conversion(node: Node) -> Conversion:
        settings = _bind(node, names)
        if settings is None:
            return None
        settings.pop("inplace", None)
        return kind(**settings), (node.args[0],)

    return conversion


def _sum(node: Node) -> Conversion:
    """The sum of two tensors that the network computes: a parameter belongs to no module's call."""
    are_computed = all(isinstance(a, Node) and a.op != "get_attr" for a in node.args)
    both = len(node.args) == 2 and not node.kwargs and are_computed
    return (SumModule(), node.args) if both else None


def _scale(node: Node) -> Conversion:
    for number, tensor in (node.args, node.args[::-1]) if len(node.args) == 2 else ():
        if isinstance(number, (int, float)) and isinstance(tensor, Node):
            return ScaleModule(number), (tensor,)
    return None


def _axes(node: Node) -> tuple[Any, ...]:
    """``permute(0, 2, 1)`` and ``permute((0, 2, 1))`` alike."""
    axes = (*node.args[1:], *node.kwargs.values())
    return tuple(axes[0]) if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes


def _permute(node: Node) -> Conversion:
    axes = _axes(node)
    if _holds_node(axes) or moves_samples(axes):
        return None
    return Permute(*axes), (node.args[0],)


def _transpose(node: Node) -> Conversion:
    axes = _axes(node)
    if _holds_node(axes) or moves_samples(axes, init_transpose=True):
        return None
    return Permute(*axes, init_transpose=True), (node.args[0],)


def _index(node: Node) -> Conversion:
    source, index = node.args
    if not isinstance(source, Node) or _holds_node(index):
        return None
    if isinstance(index, int):  # of a tensor, it would pick a sample
        return (ReduceTuple(index), (source,)) if _is_tuple(source) else None
    return Slicing(index), (source,)


def _is_tuple(node: Node) -> bool:
    """Whether a node gives the result of a recurrent or attention layer, or the states in it."""
    if node.op != "call_module":
        return False
    root = _root(node)
    module = root.get_submodule(str(node.target))
    while isinstance(module, nn.Sequential) and len(module):
        module = module[-1]
    if isinstance(module, ReduceTuple):
        (source,) = node.args
        return module.index == 1 and isinstance(source, Node) and _is_lstm(root, source)
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention))


def _is_lstm(root: Module, node: Node) -> bool:
    parts = root.get_submodule(str(node.target)).modules()
    return any(isinstance(part, nn.LSTM) for part in parts)


def _drop(node: Node) -> Conversion:
    """Dropout as a module, only if the call follows the network's train or eval mode."""
    settings = _bind(node, ("p", "training", "inplace"))
    if settings is None or settings.get("training", True) != _root(node).training:
        return None
    return nn.Dropout(settings.get("p", 0.5)), (node.args[0],)


def _softmax(kind: Callable[..., Module]) -> Convert:
    def conversion(node: Node) -> Conversion:
        settings = _bind(node, ("dim", "_stacklevel", "dtype"))
        if settings is None or settings.get("dtype") is not None:
            return None
        return kind(settings["dim"]), (node.args[0],)

    return conversion


def _max_pool(kind: Callable[..., Module]) -> Convert:
    settings = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    return _module(kind, *settings)


_AVERAGE = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")

_RELU = _module(nn.ReLU, "inplace")
_FLATTEN = _module(
    lambda start_dim=0, end_dim=-1: nn.Flatten(start_dim, end_dim), "start_dim", "end_dim"
)

_CONVERSIONS: dict[Any, Convert] = {
    **dict.fromkeys([operator.add, operator.iadd, torch.add, "add", "add_"], _sum),
    **dict.fromkeys(
        [operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply"], _scale
    ),
    operator.getitem: _index,
    **dict.fromkeys([torch.flatten, "flatten"], _FLATTEN),
    **dict.fromkeys([torch.permute, "permute"], _permute),
    **dict.fromkeys([torch.transpose, "transpose"], _transpose),
    F.pad: _module(
        lambda pad, mode="constant", value=None: Pad(pad, mode, value or 0.0),
        "pad",
        "mode",
        "value",
    ),
    **dict.fromkeys([torch.relu, F.relu, "relu", "relu_"], _RELU),
    **dict.fromkeys([torch.sigmoid, F.sigmoid, "sigmoid", "sigmoid_"], _module(nn.Sigmoid)),
    **dict.fromkeys([torch.tanh, F.tanh, "tanh", "tanh_"], _module(nn.Tanh)),
    F.relu6: _module(nn.ReLU6, "inplace"),
    F.elu: _module(nn.ELU, "alpha", "inplace"),
    F.selu: _module(nn.SELU, "inplace"),
    F.celu: _module(nn.CELU, "alpha", "inplace"),
    F.leaky_relu: _module(nn.LeakyReLU, "negative_slope", "inplace"),
    F.hardtanh: _module(nn.Hardtanh, "min_val", "max_val", "inplace"),
    F.logsigmoid: _module(nn.LogSigmoid),
    F.gelu: _module(nn.GELU, "approximate"),
    F.silu: _module(nn.SiLU, "inplace"),
    F.mish: _module(nn.Mish, "inplace"),
    F.softplus: _module(nn.Softplus, "beta", "threshold"),
    F.softsign: _module(nn.Softsign),
    F.hardswish: _module(nn.Hardswish, "inplace"),
    F.softmax: _softmax(nn.Softmax),
    F.log_softmax: _softmax(nn.LogSoftmax),
    F.dropout: _drop,
    F.max_pool1d: _max_pool(nn.MaxPool1d),
    F.max_pool2d: _max_pool(nn.MaxPool2d),
    F.max_pool3d: _max_pool(nn.MaxPool3d),
    F.avg_pool1d: _module(nn.AvgPool1d, *_AVERAGE),
    F.avg_pool2d: _module(nn.AvgPool2d, *_AVERAGE),
    F.avg_pool3d: _module(nn.AvgPool3d, *_AVERAGE),
    F.adaptive_avg_pool1d: _module(nn.AdaptiveAvgPool1d, "output_size"),
    F.adaptive_avg_pool2d: _module(nn.AdaptiveAvgPool2d, "output_size"),
    F.adaptive_avg_pool3d: _module(nn.AdaptiveAvgPool3d, "output_size"),
}
