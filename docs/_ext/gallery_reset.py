"""What every script of the gallery begins with: torch as imported, one thread, and one look."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import torch

from backpack_core.plugins import ensure_loaded
from backpack_core.testing.isolation import reset

LOOK = {
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 10,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "image.cmap": "viridis",
}


def begin(conf: dict[str, Any], name: str) -> None:
    """Sphinx-gallery calls this before every script."""
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)  # tensors are small: threads would wait for each other
    torch.manual_seed(0)
    reset()
    ensure_loaded()
    mpl.rcParams.update(LOOK)
