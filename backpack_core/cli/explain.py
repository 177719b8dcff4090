"""Explains how a quantity is computed at each parameter, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook

from backpack_core import _hooks
from backpack_core.cli.counts import EXACT, Layer, of_module, result_size, work
from backpack_core.cli.support import Given, build, classes, judge, trial
from backpack_core.cli.watch import declared_form
from backpack_core.contract.extension import Extension
from backpack_core.engine.between import between
from backpack_core.errors import UsageError
from backpack_core.extending import extend, unextend
from backpack_core.plugins.registry import registry

HEADER = ("parameter", "rule", "form", "multiply-adds", "bytes", "faster")
UNITS = "×: as many as the gradient takes, of the layer (multiply-adds) or the parameter (bytes)."

UNKNOWN = "?"
NO_PASS = "The steps of a pass follow if the factory returns a model, a loss, inputs and a target."
NO_PLAN = "The pass has no plan, so its steps are not listed. After it, block.summary() says why."
WITH_COUNTS = "Weights of affine layers are, if the factory returns inputs and a target."


class Row(NamedTuple):
    """How a quantity is computed at a parameter.

    Attributes:
        quantity: Name of the extension.
        parameter: The parameter's name in the model.
        rule: The rule and the plugin that provides it.
        form: The form of product that extensions read.
        multiply_adds: Those of gradient and quantity, relative to those of the gradient of the
            layer; ``None`` if there are no data, or no formula.
        bytes: Size of the result, relative to that of the parameter's gradient; ``None`` likewise.
        faster: What would make it faster.
    """

    quantity: str
    parameter: str
    rule: str
    form: str
    multiply_adds: float | None
    bytes: float | None
    faster: str

    def cells(self) -> list[str]:
        """The cells of a table with the columns of ``HEADER``."""
        numbers = (self.multiply_adds, self.bytes)
        shown = [UNKNOWN if number is None else f"{number:.2f}×" for number in numbers]
        return [self.parameter, self.rule, self.form, *shown, self.faster]


class Explanation(NamedTuple):
    """How quantities are computed in a net.

    Attributes:
        rows: For each quantity, a row for each trained parameter.
        plan: The steps of a backward pass; ``None`` if there is no plan.
        otherwise: Why there is no plan.
    """

    rows: list[Row]
    plan: Any
    otherwise: str


def explained(target: str, names: tuple[str, ...]) -> Explanation:
    """How quantities are computed at each parameter, and the plan of a pass for them.

    Args:
        target: ``"module:factory"``; see :func:`~backpack_core.cli.support.table_of_model`.
        names: The extensions.
    """
    extensions = classes(names)
    given = build(target)
    refused = {name: trial(given, kind) for name, kind in extensions.items()}
    possible = [kind for name, kind in extensions.items() if not refused[name]]
    if len(possible) > 1:
        trial(given, *possible)
    plan = between().latest_plan(given.modules[0])
    net = _Net(given, *_layers(given))
    extend(given.modules[0])
    rows = [row for n, kind in extensions.items() for row in _rows(net, kind, refused[n])]
    if not rows:
        kind = type(given.modules[0]).__name__
        raise UsageError(f"{kind}, which {target} returns first, has no trained parameters.")
    return Explanation(rows, plan, NO_PASS if given.target is None else NO_PLAN)


class _Net(NamedTuple):
    """A model, and what a forward pass showed about it."""

    given: Given
    layers: dict[Module, list[Layer]]
    columns: int


def _rows(net: _Net, extension: type[Extension], refused: str | None) -> Iterator[Row]:
    """A row for each trained parameter."""
    name = extension.__name__
    for path, module in net.given.modules[0].named_modules():
        if not _hooks.are_installed(module):
            continue
        cell, why = judge(module, extension, refused)
        for own, parameter in _parameters(module):
            full = f"{path}.{own}" if path else own
            costs = _costs(net, net.layers.get(module, []), name, parameter)
            words = _words(module, own, extension, cell, why)
            yield Row(name, full, *words[:2], *costs, words[2])


def _parameters(module: Module) -> list[tuple[str, Tensor]]:
    inside = not registry.resolve(module).rule.transparent
    return [(n, p) for n, p in module.named_parameters(recurse=inside) if p.requires_grad]


def _layers(given: Given) -> tuple[dict[Module, list[Layer]], int]:
    """The affine maps of every module, and the columns of an exact root, from a forward pass."""
    layers: dict[Module, list[Layer]] = {}
    model = given.modules[0]
    if not given.inputs:
        return layers, 0

    def visit(module: Module, args: tuple[Any, ...], result: Any) -> None:
        first = not any(layers.values())
        layers.setdefault(module, []).extend(of_module(module, args, result, first))

    unextend(model)
    with register_module_forward_hook(visit), torch.no_grad():
        output = model(*given.inputs)
    is_softmax = isinstance(given.modules[-1], nn.CrossEntropyLoss)  # C - 1 for C classes
    return layers, output[0].numel() - (output[0, 0].numel() if is_softmax else 0)


def _costs(
    net: _Net, layers: list[Layer], name: str, parameter: Tensor
) -> tuple[float | None, float | None]:
    """Multiply-adds and bytes, relative to those of the gradient."""
    columns = net.columns if name in EXACT else 1
    parts = [work(layer, name, columns) for layer in layers]
    if not layers or parameter.dim() < 2 or None in parts:
        return None, None
    batch, numbers = len(net.given.inputs[0]), parameter.numel()
    size = result_size(name, numbers, batch, columns) or numbers
    gradient = sum(2 * layer.product + layer.back for layer in layers)
    times = 1 + sum(part or 0 for part in parts) / gradient
    if name in ("KFAC", "KFLR"):
        size = len(parameter) ** 2 + (numbers // len(parameter)) ** 2
    return times, size / numbers


def _words(
    module: Module, name: str, extension: type[Extension], cell: str, why: str
) -> tuple[str, str, str]:
    """The cells for rule, form, and what would make it faster."""
    resolved, kind = registry.resolve(module), type(module).__name__
    rule = "automatic"
    if not resolved.is_fallback and resolved.rule.covers(module, name):
        rule = f"{type(resolved.rule).__name__} of {resolved.provenance}"
    if cell == "refused":
        return rule, "refused", why
    if rule == "automatic":
        remedy = f"install a plugin with a rule for {kind}, or write one: backpack new layer NAME"
        return rule, "where operations use it", remedy
    if cell == "graph":
        return rule, "graph of the loss", ""
    form = declared_form(type(resolved.rule)).__name__
    if cell == "fast":
        sampled = "a sampled one carries one column" if extension.__name__ in EXACT else ""
        return rule, f"{form}, contracted", sampled
    is_dense = form == "DenseProduct" and bool(extension.needs)
    return rule, f"{form}, formed", f"a ProductRule or AffineRule for {kind}" if is_dense else ""
