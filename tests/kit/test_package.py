"""Names that load when they are asked for."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import backpack_core.api
import backpack_core.testing
import backpack_products.api

APIS = {backpack_core: backpack_core.api, backpack_products: backpack_products.api}


def declared(package: ModuleType) -> set[str]:
    """Names that a module imports from others of the package, to offer them."""
    assert package.__file__
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    return {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("backpack_")
        for alias in node.names
    }


@pytest.mark.parametrize("package", APIS)
def test_every_public_name_loads_from_its_home(package: ModuleType) -> None:
    names = declared(APIS[package])
    assert len(names) > 14
    for name in names:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = package.nothing_of_the_kind


@pytest.mark.parametrize("package", [*APIS.values(), backpack_core.testing])
def test_no_public_name_is_that_of_a_module(package: ModuleType) -> None:
    """Importing the module would put it in the place of what the package exports."""
    assert package.__file__
    folder = Path(package.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    names = {n for n in declared(package) if not isinstance(getattr(package, n), ModuleType)}
    assert modules.isdisjoint(names)
