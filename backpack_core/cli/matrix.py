"""The support matrix of layers and losses against extensions, found by running each pair.

python -m backpack_core.cli.matrix --write docs/support-matrix.md
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import Module

from backpack_core.cli import catalogue
from backpack_core.cli.watch import Kind, Watch
from backpack_core.contract.extension import Extension
from backpack_core.contract.rules import LayerRule
from backpack_core.errors import BackpackError
from backpack_core.plugins import ensure_loaded
from backpack_core.plugins.registry import registry
from backpack_core.preferences import choose
from backpack_core.testing.cases import LossCase, RuleCase
from backpack_core.testing.layer_run import has_second_derivative
from backpack_core.testing.loss_checks import in_front_of
from backpack_core.testing.nets import Made, Problem
from backpack_core.testing.network import SoftmaxLoss, build_net, install_own_rules
from backpack_core.testing.quantities import ALL_NEEDS, installed_extensions
from backpack_products.derivatives import second_order
from backpack_products.elementwise import ElementwiseRule
from backpack_products.extensions import FirstOrderExtension
from backpack_products.loss import HessianLossRule
from backpack_products.parametric import AffinePairsRule, AffineRule, ParametricRule, ProductRule


@dataclass(frozen=True)
class Cell:
    """One extension on one layer.

    Attributes:
        kind: ``"rule"``: through the layer's rule; ``"fast"``: by contractions registered for the
            form of product that the rule has; ``"autodiff"``: at the operations that use the
            parameters, since there is no rule; ``"graph"``: from the graph of the loss, whatever
            the layer is; ``"refused"``: it raises an error; ``"-"``: nothing is computed.
        reason: Why it raises an error.
    """

    kind: Kind
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One layer or loss.

    Attributes:
        name: The layer.
        rule: Its rule; ``None`` if none is installed.
        cells: The cells by name of the extension.
    """

    name: str
    rule: LayerRule | None
    cells: dict[str, Cell] = field(default_factory=dict)


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
    return _row(case.label(), (net, arguments, SoftmaxLoss()), net.layer, chosen)


def loss_row(case: LossCase, chosen: Collection[str] = ()) -> Row:
    """The row of a loss, which runs behind a single layer."""
    net, arguments, bound = in_front_of(case, "mean").build(torch.float64)
    loss = bound.get_submodule("loss")
    return _row(case.label(), (net, arguments, bound), loss, chosen)


def _row(name: str, net: Made, module: Module, chosen: Collection[str]) -> Row:
    """The row of a module in a net.

    All extensions run together, while they are watched. Single passes would take twice as long.
    """
    problem = Problem(lambda dtype: net, frozenset(ALL_NEEDS))
    resolved = registry.resolve(module)
    rule = None if resolved.is_fallback else resolved.rule
    extensions = [e for e in installed_extensions() if not chosen or type(e).__name__ in chosen]
    modules = set(module.modules())
    watches = {extension: Watch(modules, extension) for extension in extensions}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the row shows that there is no rule
        usable, _ = problem.run_usable(extensions)
    row = Row(name, rule)
    for extension, watch in watches.items():
        kind = type(extension).__name__
        if extension in usable:
            row.cells[kind] = Cell(_kind(module, rule, extension, watch))
        else:
            row.cells[kind] = Cell("refused", _general(problem.refused[kind], kind, module))
    return row


def _kind(module: Module, rule: LayerRule | None, extension: Extension, watch: Watch) -> Kind:
    if extension.is_whole:
        return "graph"
    if any(p.requires_grad for p in module.parameters()):
        return watch.kind()
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


HEAD = """\
# Support matrix

Generated by running every extension on a small net around every layer, and compared in the tests:

    python -m backpack_core.cli.matrix --write docs/support-matrix.md

- **rule**: through the layer's rule. **fast**: by contractions that are registered for the form of
  product that the rule gives, and form no individual products. Both are exact.
- **graph**: read from the graph of the loss, whatever the layer is. Exact.
- **auto**: no rule is installed; parameters are read where operations use them, and quantities
  follow the autograd graph. Exact as well.
- A number: refused, for the reason at the foot of the table. A layer without parameters has nothing
  to compute for first-order extensions (·).

`backpack support module:factory` shows a model of your own.
"""


def page(families: Iterable[tuple[str, list[Row]]]) -> str:
    """The text of the page."""
    listed = list(families)
    return "\n".join([HEAD, *_tables(listed), *_capabilities(listed)]) + "\n"


def _tables(families: list[tuple[str, list[Row]]]) -> Iterator[str]:
    """One table for each distribution that provides extensions."""
    groups: dict[str, list[str]] = {}
    for name in families[0][1][0].cells:
        provenance = choose(registry.extensions[name], name, "extension").provenance
        groups.setdefault(provenance.distribution or "this process", []).append(name)
    for distribution, names in groups.items():
        yield f"## Extensions of {distribution}\n"
        reasons: dict[str, int] = {}
        for family, rows in families:
            yield f"### {family}\n"
            yield from _table(["", *names], (_cells(row, names, reasons) for row in rows))
            yield ""
        for reason, number in reasons.items():
            yield f"{number}. {reason}"
        yield ""


def _cells(row: Row, names: list[str], reasons: dict[str, int]) -> list[str]:
    texts = [row.name]
    for name in names:
        cell = row.cells[name]
        if cell.kind == "refused":
            texts.append(str(reasons.setdefault(cell.reason, len(reasons) + 1)))
        else:
            texts.append({"-": "·", "autodiff": "auto"}.get(cell.kind, cell.kind))
    return texts


def _table(header: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join('---' for _ in header)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _capabilities(families: list[tuple[str, list[Row]]]) -> Iterator[str]:
    """A table of what each rule declares."""
    rules: dict[type[LayerRule], tuple[LayerRule, list[str]]] = {}
    for row in (row for _, rows in families for row in rows if row.rule is not None):
        assert row.rule is not None
        rules.setdefault(type(row.rule), (row.rule, []))[1].append(row.name.split(" ")[0])
    yield "## Capabilities of the rules\n"
    header = ["rule", "base", "layers", "Hessian in the input", "linear in"]
    yield from _table(header, (_capability(*entry) for entry in rules.values()))


_BASES = (
    AffineRule,
    AffinePairsRule,
    ProductRule,
    ElementwiseRule,
    HessianLossRule,
    ParametricRule,
)


def _capability(rule: LayerRule, layers: list[str]) -> list[str]:
    base = next((base.__name__ for base in _BASES if isinstance(rule, base)), "LayerRule")
    linear, names = getattr(rule, "linear_in_params", ()), dict.fromkeys(layers)
    return [type(rule).__name__, base, ", ".join(names), _hessian(rule), ", ".join(linear)]


def _hessian(rule: LayerRule) -> str:
    if isinstance(rule, HessianLossRule):
        return "positive semi-definite" if rule.hessian_is_psd else "indefinite"
    if second_order(rule).hessian_is_zero:
        return "zero"
    shape = "diagonal" if second_order(rule).hessian_is_diagonal else "full"
    return shape if has_second_derivative(rule) else "not known"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description="The support matrix, from running the product.")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    chosen = parser.parse_args(arguments)
    with chosen.write.open("w", encoding="utf-8") if chosen.write else nullcontext(None) as file:
        print(page(matrix()), end="", file=file)


if __name__ == "__main__":
    gc.freeze()  # imported modules are not collected; scanning them took a third of the time
    try:
        main()
    except BackpackError as error:
        sys.exit(str(error))
