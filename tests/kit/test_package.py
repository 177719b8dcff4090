"""Names that load when they are asked for: the two lists of each package agree."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import backpack_core
import backpack_core.testing


def declared(package: ModuleType) -> dict[str, str]:
    """Names under ``if TYPE_CHECKING``, with the module they come from."""
    assert package.__file__
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: str(node.module).removeprefix(f"{package.__name__}.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("package", [backpack_core, backpack_core.testing])
def test_every_public_name_loads_from_its_home(package: ModuleType) -> None:
    names = declared(package)
    assert names == package._HOME_OF
    for name in names:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = package.nothing_of_the_kind


@pytest.mark.parametrize("package", [backpack_core, backpack_core.testing])
def test_no_public_name_is_that_of_a_module(package: ModuleType) -> None:
    """Importing the module would put it in the place of what the package exports."""
    assert package.__file__
    folder = Path(package.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules.isdisjoint(declared(package))
