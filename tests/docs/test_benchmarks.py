"""Every benchmark can be imported: what it takes from the others is there."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PEERS = {"curvlinops": "curvlinops", "laplace": "laplace-torch"}  # by the names of their modules
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", NAMES)
def test_import(name: str) -> None:
    try:
        import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name in PEERS:
            pytest.skip(f"{PEERS[error.name]} is not installed")
        raise
