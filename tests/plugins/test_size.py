"""Core, the kit and the command stay small: code lines without blanks, comments and docstrings."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

CORE = Path(__file__).parents[2] / "backpack_core"
# All of core together, of which the kit and the command are no part.
BUDGET = 3500
# Beside it.
BESIDE = {"testing": 1575, "cli": 2000}
# The checks that the products library brings to the kit: what moves there is counted, too.
OF_PRODUCTS = CORE.parent / "plugins/products/backpack_products/conformance"
BUDGET_OF_PRODUCTS = 607
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """The lines with code: no blank ones, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            lines -= {*range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    return len(lines)


def counted(folder: Path = CORE) -> Counter[str]:
    """Code lines by room; what lies in the folder itself is a room of its own."""
    found: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0]
        found[room] += code_lines(path.read_text(encoding="utf-8"))
    return found


def test_lines_are_counted() -> None:
    source = (
        '"""A\nmodule."""\n\n# why\nx = (\n    1,\n)\n\n\ndef f():\n    """Says."""\n    return x\n'
    )
    assert code_lines(source) == 5


def test_core_stays_within_its_budget() -> None:
    rooms = counted()
    for room, budget in BESIDE.items():
        own = rooms.pop(room)
        assert budget - 30 < own <= budget, f"{room} has {own} lines of code: set its budget"
    lines = sum(rooms.values())
    told = ", ".join(f"{room} {number}" for room, number in rooms.most_common())
    assert lines <= BUDGET, f"core has {lines} lines of code: {told}"
    assert lines > BUDGET - 100, f"core has shrunk to {lines} lines: lower its budget"


def test_checks_of_products_stay_within_their_budget() -> None:
    own = sum(counted(OF_PRODUCTS).values())
    assert BUDGET_OF_PRODUCTS - 30 < own <= BUDGET_OF_PRODUCTS, f"they have {own} lines of code"
