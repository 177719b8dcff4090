"""Rewrites a network with ``torch.fx`` so that its operations are modules. Imports registry, modules.

Core follows functional operations by itself; a converted network is for quantities that need a layer
rule at every nonlinear step (``DiagHessian``, say), and for module extensions, which go by module type.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node, Tracer
from torch.nn import Module
from torch.nn import functional as F

from backpack_core.context import logger
from backpack_core.errors import BackpackWarning
from backpack_core.modules import Pad, Permute, ReduceTuple, ScaleModule, Slicing, SumModule
from backpack_core.plugins import ensure_loaded
from backpack_core.registry import registry

# A conversion returns the module for a node and the node's remaining inputs, or None.
Conversion = tuple[Module, tuple[Any, ...]] | None
Convert = Callable[[Node], Conversion]

# What shape queries give are numbers, through which nothing is differentiated.
_NO_OPERATION = frozenset({"size", "dim", "getattr", "<built-in function getattr>"})


class RuleTracer(Tracer):
    """A tracer that takes every module with a layer rule, and every helper module, as one step."""

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Whether to look inside."""
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        if not registry.resolve(m).is_fallback or type(m).__module__ == SumModule.__module__:
            return not any(True for _ in m.children()) or super().is_leaf_module(
                m, module_qualified_name
            )
        return super().is_leaf_module(m, module_qualified_name)


def convert(module: Module, debug: bool = False) -> GraphModule:
    """Rewrite functions and methods as modules, as far as there is one for them.

    Sums become :class:`SumModule`, products with a number :class:`ScaleModule`, ``flatten``,
    ``permute``, ``transpose``, indexing, padding, pooling and activations the modules of their names.
    Recurrent layers of several layers become a ``Sequential`` of single ones, in-place modules
    ordinary ones, and a module without parameters that is called several times is copied.

    Args:
        module: The network. It is left as it is; parameters are shared, not copied.
        debug: Log what is converted.

    Returns:
        The converted network. Parameters may be ordered and named differently.
    """
    ensure_loaded()
    graph = RuleTracer().trace(module)
    result = GraphModule(module, graph)
    used: set[str] = set()
    for node in list(graph.nodes):
        if node.op == "call_module":
            _prepare(result, node, used)
        elif node.op in ("call_function", "call_method"):
            _replace(result, node, debug)
    graph.lint()
    result.delete_all_unused_submodules()
    result.recompile()
    _report(graph.nodes)
    return result


def _replace(root: GraphModule, node: Node, debug: bool) -> None:
    key = node.target if node.op == "call_function" else str(node.target)
    converted = _CONVERSIONS[key](node) if key in _CONVERSIONS else None
    if converted is None:
        return
    module, inputs = converted
    name = _free_name(root, _snake(type(module).__name__))
    if debug:
        logger.info("convert: %s %s -> %s '%s'", node.op, key, type(module).__name__, name)
    root.add_module(name, module.train(root.training))
    node.op, node.target, node.args, node.kwargs = "call_module", name, inputs, {}


def _prepare(root: GraphModule, node: Node, used: set[str]) -> None:
    """Bring a module that is called into the form that module extensions can handle."""
    target = str(node.target)
    module = root.get_submodule(target)
    has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    if isinstance(module, (nn.RNN, nn.LSTM)) and _can_be_split(module, node):
        root.set_submodule(target, _single_layers(module))
    elif not has_state and (target in used or getattr(module, "inplace", False)):
        copy = deepcopy(module)
        if getattr(copy, "inplace", False):
            copy.inplace = False  # type: ignore[assignment]
        if target in used:
            target = _free_name(root, target)
        root.add_submodule(target, copy)
        node.target = target
    used.add(target)


def _can_be_split(module: nn.RNN | nn.LSTM, node: Node) -> bool:
    plain = module.bias and not module.bidirectional and not module.proj_size
    return module.num_layers > 1 and plain and len(node.args) == 1 and not node.kwargs


def _single_layers(module: nn.RNN | nn.LSTM) -> nn.Sequential:
    """The layers of a recurrent network one by one, with the same parameters."""
    layers = nn.Sequential()
    extra = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
    for position in range(module.num_layers):
        layer = type(module)(
            module.input_size if position == 0 else module.hidden_size,
            module.hidden_size,
            batch_first=module.batch_first,
            **extra,
        )
        for kind in ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l"):
            setattr(layer, f"{kind}0", getattr(module, f"{kind}{position}"))
        layers.add_module(f"lstm_{position}", layer)
        if position + 1 < module.num_layers:
            layers.add_module(f"reduce_tuple_{position}", ReduceTuple())
            if module.dropout:
                layers.add_module(f"dropout_{position}", nn.Dropout(module.dropout))
    return layers.train(module.training)


def _report(nodes: Any) -> None:
    left = [
        getattr(node.target, "__name__", str(node.target))
        for node in nodes
        if node.op in ("call_function", "call_method", "get_attr")
    ]
    names = sorted({name for name in left if name not in _NO_OPERATION})
    if names:
        warnings.warn(
            f"convert: these operations stay functions: {', '.join(names)}. Quantities of first "
            "order and of the generalised Gauss-Newton matrix pass through them exactly; a quantity "
            "with second derivatives refuses those that are not linear. Write a module and a layer "
            "rule for such an operation.",
            BackpackWarning,
            stacklevel=4,
        )


def _free_name(root: Module, stem: str) -> str:
    counter = 0
    while _has(root, f"{stem}{counter}"):
        counter += 1
    return f"{stem}{counter}"


def _has(root: Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return hasattr(root.get_submodule(owner), name)


def _snake(name: str) -> str:
    letters = [("_" if c.isupper() and i and name[i - 1].islower() else "") + c for i, c in
               enumerate(name)]  # fmt: skip
    return "".join(letters).lower()


def _bind(node: Node, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The settings a node was called with, by name; ``None`` where they are not constants."""
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
    both = len(node.args) == 2 and not node.kwargs and all(isinstance(a, Node) for a in node.args)
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
    return None if _holds_node(axes) else (Permute(*axes), (node.args[0],))


def _transpose(node: Node) -> Conversion:
    axes = _axes(node)
    return None if _holds_node(axes) else (Permute(*axes, init_transpose=True), (node.args[0],))


def _index(node: Node) -> Conversion:
    source, index = node.args
    if not isinstance(source, Node) or _holds_node(index) or _gives_numbers(source):
        return None
    return (ReduceTuple(index) if isinstance(index, int) else Slicing(index)), (source,)


def _gives_numbers(node: Node) -> bool:
    return str(getattr(node.target, "__name__", node.target)) in ("size", "getattr")


def _drop(node: Node) -> Conversion:
    """Only where the call says so is dropout subject to the mode of the network."""
    settings = _bind(node, ("p", "training", "inplace"))
    if settings is None or "training" not in settings:
        return None
    return nn.Dropout(settings.get("p", 0.5)), (node.args[0],)


def _softmax(kind: Callable[..., Module]) -> Convert:
    return _module(lambda dim, _stacklevel=3: kind(dim), "dim", "_stacklevel")


_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
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
        lambda pad, mode="constant", value=None: Pad(pad, mode, value or 0.0), "pad", "mode", "value"
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
    F.max_pool1d: _module(nn.MaxPool1d, *_POOL),
    F.max_pool2d: _module(nn.MaxPool2d, *_POOL),
    F.max_pool3d: _module(nn.MaxPool3d, *_POOL),
    F.avg_pool1d: _module(nn.AvgPool1d, *_AVERAGE),
    F.avg_pool2d: _module(nn.AvgPool2d, *_AVERAGE),
    F.avg_pool3d: _module(nn.AvgPool3d, *_AVERAGE),
    F.adaptive_avg_pool1d: _module(nn.AdaptiveAvgPool1d, "output_size"),
    F.adaptive_avg_pool2d: _module(nn.AdaptiveAvgPool2d, "output_size"),
    F.adaptive_avg_pool3d: _module(nn.AdaptiveAvgPool3d, "output_size"),
}
