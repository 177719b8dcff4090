"""The support matrix of layers and losses against extensions, found by running each pair."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator

import torch
from torch.nn import Module

from backpack_core.cli import catalogue
from backpack_core.cli.table import Cell, Kind, Row
from backpack_core.cli.watch import kind_of, watch
from backpack_core.contract.extension import Extension
from backpack_core.contract.rules import LayerRule
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_core.testing.cases import LossCase, RuleCase
from backpack_core.testing.nets import Made, Problem
from backpack_core.testing.network import SoftmaxLoss, build_net, install_own_rules, loss_net
from backpack_core.testing.quantities import ALL_NEEDS, installed_extensions
from backpack_products.extensions import FirstOrderExtension


def matrix(chosen: Collection[str] = ()) -> Iterator[tuple[str, list[Row]]]:
    """Run all pairs; yields the families of the catalogue, each with its rows.

    Args:
        chosen: Names of extensions; default: all that the kit can build.
    """
    ensure_loaded()
    install_own_rules()
    for family, cases in catalogue.LAYERS.items():
        yield family, [layer_row(case, chosen) for case in cases]
    yield "Losses", [loss_row(case, chosen) for case in catalogue.LOSSES]


def layer_row(case: RuleCase, chosen: Collection[str] = ()) -> Row:
    """The row of a layer, which runs in the kit's small net."""
    net, arguments = build_net(case)
    return _row(case.name, (net, arguments, SoftmaxLoss()), net.layer, chosen)


def loss_row(case: LossCase, chosen: Collection[str] = ()) -> Row:
    """The row of a loss, which runs behind a single layer."""
    net, arguments, bound = loss_net(case, "mean", torch.float64)
    return _row(case.name, (net, arguments, bound), bound.loss, chosen)


def _row(name: str, net: Made, module: Module, chosen: Collection[str]) -> Row:
    """The row of a module in a net.

    All extensions run together, while they are watched. Single passes would take twice as long.
    """
    problem = Problem(lambda dtype: net, frozenset(ALL_NEEDS))
    resolved = registry.resolve(module)
    rule = None if resolved.is_fallback else resolved.rule
    extensions = [e for e in installed_extensions() if not chosen or type(e).__name__ in chosen]
    modules = set(module.modules())
    forms = {extension: watch(extension, modules) for extension in extensions}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the row shows that there is no rule
        usable, _ = problem.run_usable(extensions)
    cells = {}
    for extension, read in forms.items():
        kind = type(extension).__name__
        if extension in usable:
            cells[kind] = Cell(_kind(module, rule, extension, read))
        else:
            cells[kind] = Cell("refused", _general(problem.refused[kind], kind, module))
    return Row({"layer": name or type(module).__name__}, cells, rule)


def _kind(module: Module, rule: LayerRule | None, extension: Extension, forms: set[type]) -> Kind:
    if extension.is_whole:
        return "graph"
    if any(p.requires_grad for p in module.parameters()):
        return kind_of(type(extension), forms)
    if isinstance(extension, FirstOrderExtension):
        return "-"
    return "autodiff" if rule is None else "rule"


def _general(reason: str, extension: str, module: Module) -> str:
    """A reason without the names of the example."""
    kind = "|".join({type(part).__name__ for part in module.modules()})
    rules = "|".join({type(registry.resolve(part).rule).__name__ for part in module.modules()})
    for pattern, general in (
        (r"^\w+(?= starts at a loss)", "the extension"),
        (rf"({rules}) of ({kind}) '[\w.]+'|\b({rules})\b", "its rule"),
        (rf"({kind}) '[\w.]+'|\b({kind})\b", "the layer"),
        (r"the operation '\w+' \(\w+\)", "an operation"),
        (r"(the parameter )?'[\w.]+'", "a parameter"),
        (rf"\b{extension}\b", "the extension"),
    ):
        reason = re.sub(pattern, general, reason)
    return reason[:1].upper() + reason[1:]
