"""Reads what plugins declare to provide, from a file beside their code.

So a message can name a plugin that is not loaded. The file is a JSON object. Its keys are names of
extensions (``"KFAC"``) and of module types with a rule (``"torch.nn.modules.linear.Linear"``); its
values are the classes behind them (``"package.module:Class"``). ``backpack certify`` writes it.
This module imports neither plugins nor torch.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "backpack-provides.json"
# What our own distributions provide, so that messages can name those that are not installed.
KNOWN = Path(__file__).with_name("known-plugins.json")


def home_of(package: str) -> Path | None:
    """The folder of a package, or the file of a module, without importing it; else ``None``."""
    try:
        spec = find_spec(package.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    return file.parent if spec.submodule_search_locations else file


def beside(home: Path, name: str) -> Path:
    """The path of a file about a package, or about a single module."""
    return home / name if home.is_dir() else home.with_suffix(f".{name}")


def declared_by(package: str) -> dict[str, str]:
    """What the file of a package declares; empty if there is no valid file."""
    home = home_of(package)
    declared = _read(beside(home, NAME)) if home else {}
    return {str(key): value for key, value in declared.items() if isinstance(value, str)}


def known() -> dict[str, list[str]]:
    """What distributions that the core knows provide, installed or not, by distribution."""
    return _read(KNOWN)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
