"""Rewrites a network with ``torch.fx`` so that its operations are modules. Imports the registry.

The core handles functional operations without it. A converted network is for module extensions,
which are chosen by the type of a module, and for quantities that need a layer rule at every
nonlinear step.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from torch import nn
from torch.fx import GraphModule, Node, Tracer
from torch.nn import Module

from backpack_compat.conversions import converted, is_number, is_only_reader, overwrites
from backpack_core.engine.active import logger
from backpack_core.errors import BackpackWarning, UsageError
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_layers.modules import Pad, Permute, ReduceTuple, ScaleModule, Slicing, SumModule

# These stay functions: a rearrangement is linear, and may move the samples, which a module may not.
_NO_CURVATURE = frozenset({"getattr", "permute", "transpose"})

_HELPERS = (Pad, Permute, ReduceTuple, ScaleModule, Slicing, SumModule)

# What the incumbent makes of functions, before it copies a module that is called several times.
_NAMED_FIRST = (ScaleModule, nn.Flatten, SumModule, ReduceTuple, Permute)


class RuleTracer(Tracer):
    """A tracer that takes every module with a layer rule, and every helper module, as one step."""

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        """Whether to leave it whole."""
        if isinstance(m, _HELPERS) or not registry.resolve(m).is_fallback:
            return True
        return super().is_leaf_module(m, module_qualified_name)


def convert(module: Module, debug: bool = False) -> GraphModule:
    """Rewrite functions and methods as modules, if there is one for them.

    Sums become :class:`SumModule`, products with a number :class:`ScaleModule`; ``flatten``,
    ``permute``, ``transpose``, indexing, padding, pooling and activations the modules of that name.
    Recurrent layers of several layers become a ``Sequential`` of single ones, in-place modules
    ordinary ones. If a module without parameters is called several times, each call has a copy:
    ``relu0``, ``relu1`` for ``relu``. An operation that overwrites what is read elsewhere stays;
    ``h += x`` is not such an operation to ``torch.fx``, which sees ``h = h + x``.

    Args:
        module: The network. It does not change; parameters are shared, not copied.
        debug: Log what is converted.

    Returns:
        The converted network. Parameters may be ordered and named differently.

    Raises:
        UsageError: ``torch.fx`` cannot trace the network, since its ``forward`` depends on values.
    """
    ensure_loaded()
    try:
        graph = RuleTracer().trace(module)
    except (TypeError, ValueError) as error:  # fx's own error is one of these
        raise UsageError(
            f"torch.fx cannot rewrite {type(module).__name__}: {error}. Leave out the converter: "
            "extend(model) takes any forward pass as it runs. Or make what depends on values or "
            "arguments a module of its own."
        ) from error
    result = GraphModule(module, graph)
    graph.eliminate_dead_code(lambda node: node.is_impure() or overwrites(node))
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    made: list[Any] = []
    for node in list(graph.nodes):
        if node.op == "call_module":
            made += _prepare(result, node, calls)
        elif node.op in ("call_function", "call_method"):
            made += _replace(result, node)
    _name(result, made, debug)
    graph.lint()
    _report(graph.nodes)
    return GraphModule(result, graph)  # only with what is called, in the order of the calls


class _Made(NamedTuple):
    """A module that was made for a node: what its name begins with, and who is named first."""

    node: Node
    stem: str
    rank: int


def _replace(root: GraphModule, node: Node) -> Iterator[_Made]:
    found = converted(node)
    if found is None:
        return
    module, inputs = found
    name = _add(root, module.train(root.training))
    node.op, node.target, node.args, node.kwargs = "call_module", name, inputs, {}
    yield _Made(node, _snake(type(module).__name__), 0 if isinstance(module, _NAMED_FIRST) else 2)


def _prepare(root: GraphModule, node: Node, calls: Counter[str]) -> Iterator[_Made]:
    """Bring a module that is called into the form that module extensions can handle."""
    target = str(node.target)
    module = root.get_submodule(target)
    has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    if isinstance(module, (nn.RNN, nn.LSTM)):
        same = [n for n in node.graph.nodes if (n.op, n.target) == (node.op, node.target)]
        if _can_be_split(module, root, same):
            root.set_submodule(target, _single_layers(module))
        return
    is_repeated = calls[target] > 1
    can_return = overwrites(node) and is_only_reader(node)  # a new tensor
    if has_state or not (is_repeated or can_return):
        return
    copy = deepcopy(module)
    if can_return:
        copy.inplace = False  # type: ignore[assignment]
    if is_repeated:
        node.target = _add(root, copy)
        yield _Made(node, target, 1)
    else:
        root.set_submodule(target, copy)


def _add(root: GraphModule, module: Module) -> str:
    """Add a module under a name that it has until :func:`_name`."""
    name = _free_name(root, "made_")
    root.add_module(name, module)
    return name


def _name(root: GraphModule, made: list[_Made], debug: bool) -> None:
    """Number the new modules as the incumbent does, which rewrites kind by kind."""
    for node, stem, _ in sorted(made, key=lambda one: one.rank):
        module = root.get_submodule(str(node.target))
        node.target = name = _free_name(root, stem)
        root.add_submodule(name, module)
        if debug:
            logger.info("convert: %s '%s'", type(module).__name__, name)


def _can_be_split(module: nn.RNN | nn.LSTM, root: Module, calls: list[Node]) -> bool:
    """Whether single layers do the same in all calls; only their last states are left."""
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
            "order and of the generalised Gauss-Newton matrix pass through them exactly. Those "
            "with second derivatives refuse nonlinear ones: write a module and a layer rule for "
            "these.",
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
