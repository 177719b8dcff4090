"""More than the gradient during ``loss.backward()``: a small core, and plugins for everything else.

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

model, lossfunc = extend(model), extend(lossfunc)
loss = lossfunc(model(X), y)
with backpack(DiagGGNExact()):
loss.backward()
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from backpack_core.calls import ModuleCall as ModuleCall
    from backpack_core.columns import Columns as Columns
    from backpack_core.context import backpack as backpack
    from backpack_core.context import disable as disable
    from backpack_core.extend import extend as extend
    from backpack_core.extend import is_extended as is_extended
    from backpack_core.extend import unextend as unextend
    from backpack_core.extension import ColumnPropagator as ColumnPropagator
    from backpack_core.extension import Extension as Extension
    from backpack_core.extension import FirstOrderExtension as FirstOrderExtension
    from backpack_core.extension import Propagator as Propagator
    from backpack_core.extension import SecondOrderExtension as SecondOrderExtension
    from backpack_core.hookspecs import hookimpl as hookimpl
    from backpack_core.loss_rule import LossRule as LossRule
    from backpack_core.module_extension import (
        FirstOrderModuleExtension as FirstOrderModuleExtension,
    )
    from backpack_core.module_extension import ModuleExtension as ModuleExtension
    from backpack_core.ops.generic import memory_budget as memory_budget
    from backpack_core.ops.generic import set_memory_budget as set_memory_budget
    from backpack_core.plugins import prefer as prefer
    from backpack_core.plugins import register as register
    from backpack_core.plugins import unregister as unregister
    from backpack_core.rules import AffinePairsRule as AffinePairsRule
    from backpack_core.rules import AffineRule as AffineRule
    from backpack_core.rules import ElementwiseRule as ElementwiseRule
    from backpack_core.rules import LayerRule as LayerRule
    from backpack_core.rules import ParametricRule as ParametricRule

# The same names by their homes; a test compares the two lists.
_HOMES = {
    "calls": "ModuleCall",
    "columns": "Columns",
    "context": "backpack disable",
    "extend": "extend is_extended unextend",
    "extension": "ColumnPropagator Extension FirstOrderExtension Propagator SecondOrderExtension",
    "hookspecs": "hookimpl",
    "loss_rule": "LossRule",
    "module_extension": "FirstOrderModuleExtension ModuleExtension",
    "ops.generic": "memory_budget set_memory_budget",
    "plugins": "prefer register unregister",
    "rules": "AffinePairsRule AffineRule ElementwiseRule LayerRule ParametricRule",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


class _Package(ModuleType):
    """Loads a public name when it is asked for.

    pytest imports this package in every run in which it is installed, to get at the plugin of the
    conformance kit. That must not cost the seconds that importing torch takes.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{self.__name__}.{_HOME_OF[name]}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The module `extend` is the home of the function `extend`, which is what users mean.
        if name == "extend" and isinstance(value, ModuleType):
            value = value.extend
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME_OF})


sys.modules[__name__].__class__ = _Package
