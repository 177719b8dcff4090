"""Names that load when they are asked for: the two lists of the package agree."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import backpack_core
import backpack_core.testing


def declared(package: ModuleType) -> dict[str, str]:
    """Names that a package imports from its modules, for type checkers at least."""
    assert package.__file__
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name: str(node.module).removeprefix(f"{package.__name__}.")
        for node in [*tree.body, *(node for block in blocks for node in block)]
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(package.__name__)
        for alias in node.names
    }


def test_every_public_name_loads_from_its_home() -> None:
    names = declared(backpack_core)
    assert names == backpack_core._HOME_OF
    for name in names:
        assert getattr(backpack_core, name) is not None
        assert name in dir(backpack_core)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = backpack_core.nothing_of_the_kind


@pytest.mark.parametrize("package", [backpack_core, backpack_core.testing])
def test_no_public_name_is_that_of_a_module(package: ModuleType) -> None:
    """Importing the module would put it in the place of what the package exports."""
    assert package.__file__
    folder = Path(package.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules.isdisjoint(declared(package))
