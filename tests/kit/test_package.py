"""Names that load when they are asked for."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import backpack_core
import backpack_core.testing
from backpack_core import api


def declared(package: ModuleType) -> set[str]:
    """Names that a module imports from others of the package, to offer them."""
    assert package.__file__
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    return {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("backpack_core.")
        for alias in node.names
    }


def test_every_public_name_loads_from_its_home() -> None:
    names = declared(api)
    assert len(names) > 30
    for name in names:
        assert getattr(backpack_core, name) is not None
        assert name in dir(backpack_core)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = backpack_core.nothing_of_the_kind


@pytest.mark.parametrize("package", [api, backpack_core.testing])
def test_no_public_name_is_that_of_a_module(package: ModuleType) -> None:
    """Importing the module would put it in the place of what the package exports."""
    assert package.__file__
    folder = Path(package.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules.isdisjoint(declared(package))
