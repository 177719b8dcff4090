"""Finds out in which form a quantity is computed, from one run."""

from __future__ import annotations

from typing import Any, Literal

from torch.nn import Module

from backpack_core.contract.autodiff import AutodiffRule
from backpack_core.contract.extension import Extension
from backpack_core.contract.product import DenseProduct

Kind = Literal["rule", "fast", "autodiff", "refused", "-"]


class Watch:
    """Notes what an extension reads at some modules. It takes the place of its ``read``."""

    def __init__(self, modules: set[Module], extension: Extension) -> None:
        """Start to watch.

        Args:
            modules: The modules in question.
            extension: The extension; this instance stays watched.
        """
        self.modules = modules
        self.kinds: set[Kind] = set()
        self.read = extension.read
        extension.read = self  # type: ignore[method-assign]

    def __call__(self, product: Any) -> Any:
        """In the place of ``read``."""
        if product.module in self.modules:
            self.kinds.add(_kind(product))
        return self.read(product)

    def kind(self) -> Kind:
        """What it amounts to."""
        return next((kind for kind in ("autodiff", "fast") if kind in self.kinds), "rule")


def _kind(product: Any) -> Kind:
    if issubclass(product.rule, AutodiffRule):
        return "autodiff"
    return "rule" if isinstance(product, DenseProduct) else "fast"
