"""A table of what is supported, and its lines on a terminal, where equal rows are folded."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from backpack_core.contract.rules import LayerRule

Kind = Literal["rule", "fast", "autodiff", "graph", "refused", "-"]


class Cell(NamedTuple):
    """One extension at one layer, loss or module.

    Attributes:
        kind: ``"rule"``: through the layer's rule; ``"fast"``: by contractions registered for the
            form of product that the rule has; ``"autodiff"``: at the operations that use the
            parameters, since there is no rule; ``"graph"``: from the graph of the loss, whatever
            the layer is; ``"refused"``: it raises an error; ``"-"``: nothing is computed.
        reason: Why it raises an error.
    """

    kind: Kind
    reason: str = ""


class Row(NamedTuple):
    """One layer, loss or module.

    Attributes:
        labels: Its name, by the name of the column. A module of a model has its type, rule and
            plugin, too.
        cells: The cells by name of the extension.
        rule: Its rule; ``None`` if none is installed.
    """

    labels: dict[str, str]
    cells: dict[str, Cell]
    rule: LayerRule | None = None

    def as_json(self) -> dict[str, Any]:
        """What each column says, with the reasons under ``"reasons"``."""
        kinds = {name: cell.kind for name, cell in self.cells.items()}
        reasons = {name: cell.reason for name, cell in self.cells.items() if cell.reason}
        return {**self.labels, **kinds, "reasons": reasons}


_MEANING = {
    "fast": "by a rule, without forming single gradients",
    "rule": "by a rule",
    "autodiff": "parameters where operations use them: exact",
    "graph": "from the graph of the loss",
    "-": "nothing to compute here",
    "refused": "no exact value, and why",
}


def folded(rows: Iterable[Row], width: int) -> Iterator[str]:
    """The lines of a folded table: for each group of equal rows, what is supported.

    Args:
        rows: What is supported.
        width: Columns of the terminal, and the length of a line at most.
    """
    groups: dict[Any, list[str]] = {}
    for row in rows:
        name, *own = row.labels.values()  # the modules of a model have types and rules
        groups.setdefault((tuple(own), tuple(row.cells.items())), []).append(name)
    for word, meaning in _MEANING.items():
        yield from _wrapped(f"{word:9} ", meaning, width)
    for (more, cells), names in groups.items():
        yield ""
        title = ", ".join(names) + (": {}, {} of {}".format(*more) if more else "")
        yield from textwrap.wrap(title, width, subsequent_indent="    ")
        yield from _cells(cells, width)


def _cells(cells: Iterable[tuple[str, Cell]], width: int) -> Iterator[str]:
    by_cell: dict[Cell, list[str]] = {}
    for name, cell in cells:
        by_cell.setdefault(cell, []).append(name)
    for cell in sorted(by_cell, key=lambda cell: [*_MEANING].index(cell.kind)):
        label, names = f"  {cell.kind:9}", ", ".join(by_cell[cell])
        if cell.reason:
            text = f"{label}{names}: {' '.join(cell.reason.split())}"
            yield from textwrap.wrap(text, width, subsequent_indent="    ")
        else:
            yield from _wrapped(label, names, width)


def _wrapped(label: str, text: str, width: int) -> list[str]:
    indent = " " * len(label)
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=indent)
