"""Two distributions have a package named ``backpack``: says which is active."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

OURS = "backpack-compat"
INCUMBENT = "backpack-for-pytorch"

# A file that only this distribution has.
_MARK = "presence.py"


def examine() -> tuple[str, str, str] | None:
    """The finding for ``backpack doctor``: the distribution, the fault, and the remedy."""
    found = namesakes()
    return None if found is None else (f"{OURS}, {INCUMBENT}", *found)


def namesakes() -> tuple[str, str] | None:
    """Whether both distributions with a package ``backpack`` are installed, as a message.

    Returns:
        Which of them ``import backpack`` gives, and how to choose; ``None`` unless both are
        installed.
    """
    versions = {name: _version(name) for name in (OURS, INCUMBENT)}
    if None in versions.values():
        return None
    folder = _folder()
    if folder is None:
        active = "neither can be imported"
    else:
        name = OURS if (folder / _MARK).exists() else INCUMBENT
        active = f"`import backpack` gives {name}, in {folder}"
    problem = (
        f"{OURS} {versions[OURS]} and {INCUMBENT} {versions[INCUMBENT]} both provide the package "
        f"`backpack`, and {active}. One installed over the other may leave files of both"
    )
    remedy = (
        f"To keep {OURS}: pip uninstall {INCUMBENT}, then pip install --force-reinstall --no-deps "
        f"{OURS}. To keep {INCUMBENT}: the same with the names exchanged."
    )
    return problem, remedy


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _folder() -> Path | None:
    spec = find_spec("backpack")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent
