"""What computes a quantity at each parameter, and what it costs. Imports core."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module

from backpack_core import _hooks
from backpack_core.cli.counts import EXACT, Layer, of_module, result_size, work
from backpack_core.cli.support import Given, build, classes, judge, trial
from backpack_core.contract.extension import Extension
from backpack_core.extending import extend, unextend
from backpack_core.plan.plan import Plan, plans
from backpack_core.plugins.registry import registry
from backpack_core.testing.watch import declared_form

HEADER = ("parameter", "rule", "form", "multiply-adds", "bytes", "faster")

UNKNOWN = "?"
NO_PLAN = (
    "There is no plan of a backward pass: none was run, which takes a loss, inputs and a target, "
    "or none can be made. After a pass, block.summary() says why."
)
WITH_COUNTS = "Weights of affine layers are, where the factory returns inputs and target."


class Explanation(NamedTuple):
    """How a quantity is computed in a net.

    Attributes:
        rows: A row for each trained parameter, with the columns of ``HEADER``.
        plan: What a backward pass does, step by step; ``None`` where there is no plan.
    """

    rows: list[list[str]]
    plan: Plan | None


def explained(target: str, name: str) -> Explanation:
    """How a quantity is computed at each parameter, and the plan of a pass.

    Args:
        target: ``"module:factory"``; see :func:`~backpack_core.cli.support.model_report`.
        name: The extension.

    Returns:
        In each row the parameter, its rule, the form in which it is read, multiply-adds beyond the
        gradient's and bytes of the result, both relative to the gradient of the layer (``?`` where
        no data were given, or nobody counted), and what would make it faster.
    """
    extension = classes((name,))[name]
    given = build(target)
    refused = trial(given, extension)
    model = given.modules[0]
    plan = plans.latest(model)
    layers, columns = _layers(given)
    extend(model)
    rows = []
    for path, module in model.named_modules():
        if not _hooks.are_installed(module):
            continue
        cell, why = judge(module, registry.resolve(module), extension)
        for own, parameter in _parameters(module):
            full = f"{path}.{own}" if path else own
            costs = _costs(layers.get(module, []), name, parameter, given, columns)
            words = _words(module, own, extension, cell, refused or why)
            rows.append([full, *words[:2], *costs, words[2]])
    return Explanation(rows, plan)


def _parameters(module: Module) -> list[tuple[str, Tensor]]:
    resolved = registry.resolve(module)
    inside = not resolved.rule.transparent
    return [(n, p) for n, p in module.named_parameters(recurse=inside) if p.requires_grad]


def _layers(given: Given) -> tuple[dict[Module, list[Layer]], int]:
    """The affine maps of every module, from one forward pass, and the columns of an exact root."""
    found: dict[Module, list[Layer]] = {}
    model = given.modules[0]
    if not given.data:
        return found, 0

    def visit(module: Module, args: tuple[Any, ...], result: Any) -> None:
        first = not any(found.values())
        found.setdefault(module, []).extend(of_module(module, args, result, first))

    unextend(model)
    hooks = [module.register_forward_hook(visit) for module in model.modules()]
    try:
        with torch.no_grad():
            output = model(*given.data[: max(1, len(given.data) - 1)])
    finally:
        for hook in hooks:
            hook.remove()
    is_softmax = isinstance(given.modules[-1], nn.CrossEntropyLoss)  # C - 1 for C classes
    return found, output[0].numel() - (output[0, 0].numel() if is_softmax else 0)


def _costs(layers: list[Layer], name: str, parameter: Tensor, given: Given, root: int) -> list[str]:
    """Multiply-adds and bytes relative to the gradient."""
    columns = root if name in EXACT else 1
    batch = len(given.data[0]) if given.data else 0
    size = result_size(name, parameter.numel(), batch, columns) or parameter.numel()
    parts = [work(layer, name, columns) for layer in layers]
    known = bool(layers) and parameter.dim() > 1 and all(part is not None for part in parts)
    gradient = sum(2 * layer.product + layer.back for layer in layers)
    times = f"{1 + sum(part or 0 for part in parts) / gradient:.2f}" if known else UNKNOWN
    if name in ("KFAC", "KFLR"):
        rows, rest = len(parameter), parameter.numel() // len(parameter)
        size = rows**2 + (rest**2 if parameter.dim() > 1 else 0)
    is_known = known and (batch or size == parameter.numel())
    return [times, f"{size / parameter.numel():.2f}" if is_known else UNKNOWN]


def _words(
    module: Module, own: str, extension: type[Extension], cell: str, why: str
) -> tuple[str, str, str]:
    """Rule, form, and what would make it faster."""
    resolved, kind = registry.resolve(module), type(module).__name__
    rule = "automatic"
    if not resolved.is_fallback and resolved.rule.covers(module, own):
        rule = f"{type(resolved.rule).__name__} of {resolved.provenance}"
    if cell == "refused" or why:
        return rule, "refused", why
    if rule == "automatic":
        known = f"install a plugin with a rule for {kind}, or write one: backpack new layer NAME"
        return rule, "where operations use it", known
    if cell == "graph":
        return rule, "graph of the loss", ""
    form = declared_form(type(resolved.rule)).__name__
    if cell == "fast":
        exact = extension.__name__ in EXACT
        return rule, f"{form}, contracted", "a sampled one carries one column" if exact else ""
    is_dense = form == "DenseProduct" and bool(extension.needs)
    return rule, f"{form}, formed", f"a ProductRule or AffineRule for {kind}" if is_dense else ""
