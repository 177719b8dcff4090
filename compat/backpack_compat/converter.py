"""Rewrites a network with ``torch.fx`` so that its operations are modules. Imports the registry.

The core handles functional operations without it. A converted network is for module extensions,
which are chosen by the type of a module, and for quantities that need a layer rule at every
nonlinear step.
"""

from __future__ import annotations

import operator
import re
import warnings
from copy import deepcopy
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node, Tracer
from torch.nn import Module

from backpack_compat.conversions import converted, is_number, is_only_reader, overwrites
from backpack_core.engine.active import logger
from backpack_core.errors import BackpackWarning
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_layers.modules import Pad, Permute, ReduceTuple, ScaleModule, Slicing, SumModule

# These stay functions: a rearrangement is linear, and may move the samples, as no module may.
_NO_CURVATURE = frozenset({"getattr", "permute", "transpose"})

_HELPERS = (Pad, Permute, ReduceTuple, ScaleModule, Slicing, SumModule)


class RuleTracer(Tracer):
    """A tracer that takes every module with a layer rule, and every helper module, as one step."""

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Whether to leave it whole."""
        if isinstance(m, _HELPERS) or not registry.resolve(m).is_fallback:
            return True
        return super().is_leaf_module(m, module_qualified_name)


def convert(module: Module, debug: bool = False) -> GraphModule:
    """Rewrite functions and methods as modules, as far as there is one for them.

    Sums become :class:`SumModule`, products with a number :class:`ScaleModule`; ``flatten``,
    ``permute``, ``transpose``, indexing, padding, pooling and activations the modules of that name.
    Recurrent layers of several layers become a ``Sequential`` of single ones, in-place modules
    ordinary ones, and a module without parameters that is called several times is copied. An
    operation that overwrites what is read elsewhere stays; ``h += x`` is no such operation to
    ``torch.fx``, which sees ``h = h + x``.

    Args:
        module: The network. It is left as it is; parameters are shared, not copied.
        debug: Log what is converted.

    Returns:
        The converted network. Parameters may be ordered and named differently.
    """
    ensure_loaded()
    graph = RuleTracer().trace(module)
    result = GraphModule(module, graph)
    graph.eliminate_dead_code(lambda node: node.is_impure() or overwrites(node))
    called: dict[str, Module] = {}
    for node in list(graph.nodes):
        if node.op == "call_module":
            _prepare(result, node, called)
        elif node.op in ("call_function", "call_method"):
            _replace(result, node, debug)
    graph.lint()
    result.delete_all_unused_submodules()
    result.recompile()
    _report(graph.nodes)
    return result


def _replace(root: GraphModule, node: Node, debug: bool) -> None:
    found = converted(node)
    if found is None:
        return
    module, inputs = found
    name = _free_name(root, _snake(type(module).__name__))
    if debug:
        logger.info("convert: %s -> %s '%s'", node.target, type(module).__name__, name)
    root.add_module(name, module.train(root.training))
    node.op, node.target, node.args, node.kwargs = "call_module", name, inputs, {}


def _prepare(root: GraphModule, node: Node, called: dict[str, Module]) -> None:
    """Bring a module that is called into the form that module extensions can handle."""
    target = str(node.target)
    is_repeated = target in called
    module = called.setdefault(target, root.get_submodule(target))
    has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    if isinstance(module, (nn.RNN, nn.LSTM)):
        calls = [n for n in node.graph.nodes if (n.op, n.target) == (node.op, node.target)]
        if _can_be_split(module, root, calls):
            root.set_submodule(target, _single_layers(module))
        return
    can_return = overwrites(node) and is_only_reader(node)  # a new tensor
    if not has_state and (is_repeated or can_return):
        copy = deepcopy(module)
        if can_return:
            copy.inplace = False  # type: ignore[assignment]
        if is_repeated:
            target = _free_name(root, target)
        root.add_submodule(target, copy)
        node.target = target


def _can_be_split(module: nn.RNN | nn.LSTM, root: Module, calls: list[Node]) -> bool:
    """Whether single layers do the same in all calls; of their states, the last ones are left."""
    plain = module.bias and not module.bidirectional and not module.proj_size
    are_plain = all(len(call.args) == 1 and not call.kwargs for call in calls)
    are_states_unread = all(_picked(root, user) == 0 for call in calls for user in call.users)
    return module.num_layers > 1 and plain and are_plain and are_states_unread


def _picked(root: Module, node: Node) -> Any:
    """Which element of a tuple a node picks; ``None`` if it does something else."""
    if node.op == "call_module":
        return getattr(root.get_submodule(str(node.target)), "index", None)
    return node.args[1] if node.target is operator.getitem else None


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
        if node.op in ("call_function", "call_method", "get_attr") and not is_number(node)
    ]
    names = sorted({name for name in left if name not in _NO_CURVATURE})
    if names:
        warnings.warn(
            f"convert: these operations stay functions: {', '.join(names)}. Quantities of first "
            "order and of the generalised Gauss-Newton matrix pass through them exactly; those "
            "with second derivatives refuse any that is not linear: write a module and a layer "
            "rule for it.",
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
    """As ``"leaky_relu"`` for ``"LeakyReLU"``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z]|ReLU)", "_", name).lower()
