"""Which of the two packages named ``backpack`` is active. Imports the standard library only."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path

INCUMBENT = "backpack-for-pytorch"
OURS = "backpack-compat"


def incumbent_version() -> str | None:
    """The version of ``backpack-for-pytorch`` in this environment; ``None`` where it is not."""
    try:
        return metadata.version(INCUMBENT)
    except metadata.PackageNotFoundError:
        return None


def presence_report() -> str | None:
    """One paragraph for ``backpack doctor``.

    Returns:
        Which of the two packages ``import backpack`` gives, and how to choose; ``None`` where there
        is only one.
    """
    version = incumbent_version()
    if version is None:
        return None
    return (
        f"{INCUMBENT} {version} and {OURS} are both installed, and both are imported as "
        f"`backpack`. Active is {OURS}, in {Path(__file__).parent}. One installed over the other "
        f"may leave files of both. To keep {OURS}: `pip uninstall {INCUMBENT}`, then `pip install "
        f"--force-reinstall --no-deps {OURS}`. To keep {INCUMBENT}: `pip uninstall {OURS}`, then "
        f"`pip install --force-reinstall --no-deps {INCUMBENT}`."
    )


def warn_about_incumbent() -> None:
    """Warn at import where both packages are installed."""
    report = presence_report()
    if report is not None:
        warnings.warn(report, UserWarning, stacklevel=3)
