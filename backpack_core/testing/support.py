"""The support matrix, layers and losses against extensions, found by running each pair.

    python -m backpack_core.testing.support --write docs/support-matrix.md

:func:`of_model` gives the same for a user's model, without a backward pass.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn import Module

from backpack_core import _hooks
from backpack_core.contract.extension import Extension, FirstOrderExtension
from backpack_core.contract.graph_extension import GraphExtension
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import BackpackError
from backpack_core.extending import extend
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_core.testing import catalogue
from backpack_core.testing.cases import SAMPLES, Arguments, LossCase, RuleCase, seeded
from backpack_core.testing.extensions_run import ALL_NEEDS, Problem, installed_extensions
from backpack_core.testing.network import (
    BoundLoss,
    Shrink,
    SoftmaxLoss,
    build_net,
    install_own_rules,
)
from backpack_core.testing.reference import Reference
from backpack_core.testing.watch import Kind, Watch


@dataclass(frozen=True)
class Cell:
    """One extension on one layer.

    Attributes:
        kind: ``"rule"``: through the layer's rule; ``"fast"``: by contractions registered for the
            form of product that the rule gives; ``"autodiff"``: where operations use them,
            since there is no rule; ``"graph"``: from the graph of the loss, whatever the layer is;
            ``"refused"``: it raises; ``"-"``: there is nothing to compute.
        reason: Why it raises.
    """

    kind: Kind
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One layer or loss.

    Attributes:
        name: The layer.
        rule: Its rule, ``None`` where none is installed.
        cells: By name of the extension.
    """

    name: str
    rule: LayerRule | None
    cells: dict[str, Cell] = field(default_factory=dict)


@dataclass(frozen=True)
class ModulePath:
    """How one module of a model is differentiated.

    Attributes:
        path: Its path in the model.
        type: Its class.
        way: ``"rule"``, ``"autodiff"`` (parameters where operations use them) or
            ``"graph"`` (nothing to do but to be followed).
        rule: The rule's class; empty without one.
        provenance: The distribution that provides the rule.
    """

    path: str
    type: str
    way: Literal["rule", "autodiff", "graph"]
    rule: str
    provenance: str


def of_model(model: Module) -> list[ModulePath]:
    """How each module that is one operation will be differentiated, without a backward pass.

    Args:
        model: The model; it is extended.

    Returns:
        One row for each operation, in the order of ``named_modules``.
    """
    extend(model)
    rows = []
    for path, module in model.named_modules():
        if not _hooks.are_installed(module):
            continue
        resolved = registry.resolve(module)
        own = any(p.requires_grad for p in module.parameters(recurse=False))
        way: Literal["rule", "autodiff", "graph"] = "rule"
        if resolved.is_fallback:
            way = "autodiff" if own else "graph"
        rule = "" if resolved.is_fallback else type(resolved.rule).__name__
        rows.append(ModulePath(path, type(module).__name__, way, rule, str(resolved.provenance)))
    return rows


def support_matrix() -> tuple[list[str], list[list[str]]]:
    """The whole matrix as text: header and rows, one for each layer and loss of the catalogue."""
    names = [type(extension).__name__ for extension in installed_extensions()]
    rows = [row for _, family in matrix() for row in family]
    table = [[row.name, *(row.cells[name].kind for name in names)] for row in rows]
    return ["layer", *names], table


def matrix() -> Iterator[tuple[str, list[Row]]]:
    """Run everything: families of the catalogue, with their rows."""
    ensure_loaded()
    install_own_rules()
    for family, cases in catalogue.LAYERS.items():
        yield family, [layer_row(case) for case in cases]
    yield "Losses", [loss_row(case) for case in catalogue.LOSSES]


def layer_row(case: RuleCase) -> Row:
    """One layer in the kit's small net."""
    net, arguments = build_net(case, SAMPLES)
    given = _problem(net, arguments, SoftmaxLoss())
    return _row(case.label(), given, net.layer)


def loss_row(case: LossCase) -> Row:
    """One loss behind a single layer."""
    given = case.as_rule_case("mean").arguments()
    loss = seeded(lambda: case.loss_factory(reduction="mean"), 0).double()
    first = given.args[0]
    net = seeded(lambda: Shrink(first.shape[1:]), 8).double()
    bound = BoundLoss(loss, given.to(torch.float64))
    return _row(case.label(), _problem(net, Arguments((first,)), bound), loss)


def _problem(net: Module, arguments: Arguments, loss: Module) -> Problem:
    everything = frozenset(ALL_NEEDS)
    return Problem(
        lambda dtype: (net, arguments, loss), Reference(net, arguments, loss), everything
    )


def _row(name: str, given: Problem, module: Module) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the row says that there is no rule
        return _run_row(name, given, module)


def _run_row(name: str, given: Problem, module: Module) -> Row:
    resolved = registry.resolve(module)
    rule = None if resolved.is_fallback else resolved.rule
    row = Row(name, rule)
    extensions = installed_extensions()
    usable = {type(extension) for extension in given.usable(extensions)}
    for extension in extensions:
        kind = type(extension).__name__
        if type(extension) in usable:
            row.cells[kind] = Cell(_kind(given, module, rule, extension))
        else:
            row.cells[kind] = Cell("refused", _general(given.refused[kind], kind, module))
    return row


def _kind(given: Problem, module: Module, rule: LayerRule | None, extension: Extension) -> Kind:
    if isinstance(extension, GraphExtension):
        return "graph"
    own = [p for p in module.parameters() if p.requires_grad]
    if not own:
        if isinstance(extension, FirstOrderExtension):
            return "-"
        return "autodiff" if rule is None else "rule"
    return _traced(given, module, extension)


_known: dict[tuple[Any, ...], Kind] = {}


def _traced(given: Problem, module: Module, extension: Extension) -> Kind:
    """In which form the parameters are read, by watching one pass; once per kind of rule."""
    key = (type(extension), tuple(type(registry.resolve(m).rule) for m in module.modules()))
    if key not in _known:
        watch = Watch(set(module.modules()), extension)
        given.run([extension])
        _known[key] = watch.kind()
    return _known[key]


def _general(reason: str, extension: str, module: Module) -> str:
    """A reason with the names of the example removed."""
    kind = "|".join({type(part).__name__ for part in module.modules()})
    own = "|".join({type(registry.resolve(part).rule).__name__ for part in module.modules()})
    for pattern, general in (
        (r"^\w+(?= starts at a loss)", "the extension"),
        (rf"({own}) of ({kind}) '[\w.]+'|\b({own})\b", "its rule"),
        (rf"({kind}) '[\w.]+'|\b({kind})\b", "the layer"),
        (r"the operation '\w+' \(\w+\)", "an operation"),
        (r"(the parameter )?'[\w.]+'", "a parameter"),
        (rf"\b{extension}\b", "the extension"),
    ):
        reason = re.sub(pattern, general, reason)
    return reason[:1].upper() + reason[1:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, or write it."""
    import argparse
    from pathlib import Path

    from backpack_core.testing.support_page import page

    parser = argparse.ArgumentParser(description="The support matrix, from running the product.")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    chosen = parser.parse_args(arguments)
    text = page(matrix())
    if chosen.write is None:
        print(text, end="")
    else:
        chosen.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except BackpackError as error:
        sys.exit(str(error))
