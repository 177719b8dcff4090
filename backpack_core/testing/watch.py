"""Finds out by which functions a quantity is computed, from one run. Imports core only."""

from __future__ import annotations

import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any, Literal

from torch.nn import Module

from backpack_core import ops
from backpack_core.autodiff import AutodiffRule
from backpack_core.extension import Extension
from backpack_core.rules import LayerRule

Kind = Literal["rule", "fast", "autodiff", "refused", "-"]


class Watch:
    """Notes which implementations of operations an extension uses at some modules.

    It takes the place of the extension's ``read``.
    """

    def __init__(self, modules: set[Module], extension: Extension) -> None:
        """Start to watch.

        Args:
            modules: The modules in question.
            extension: The extension; this instance stays watched.
        """
        self.modules, self.used, self.rules = modules, set[CodeType](), set[type[LayerRule]]()
        self.read = extension.read
        extension.read = self  # type: ignore[method-assign]

    def __call__(self, rule: LayerRule, call: Any, name: str, mat: Any) -> Any:
        """In the place of ``read``."""
        if call.module not in self.modules:
            return self.read(rule, call, name, mat)
        self.rules.add(type(rule))
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            return self.read(rule, call, name, mat)
        finally:
            sys.setprofile(before)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.used.add(frame.f_code)

    def kind(self) -> Kind:
        """What it amounts to."""
        if any(issubclass(rule, AutodiffRule) for rule in self.rules):
            return "autodiff"
        return "fast" if self.used & _fast_codes() else "rule"


@cache
def _fast_codes() -> frozenset[CodeType]:
    """Code of every implementation that is registered for a particular kind of rule."""
    generic = (object, LayerRule, ops.MaterializedRule)
    return frozenset(
        implementation.__code__
        for operation in vars(ops).values()
        for kind, implementation in getattr(operation, "registry", {}).items()
        if kind not in generic and hasattr(implementation, "__code__")
    )
