"""More than the gradient during ``loss.backward()``: a small core, and plugins for everything else.

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

model, lossfunc = extend(model), extend(lossfunc)
loss = lossfunc(model(X), y)
with backpack(DiagGGNExact()):
    loss.backward()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from backpack_core.context import backpack as backpack
    from backpack_core.contract.affine import AffineProduct as AffineProduct
    from backpack_core.contract.column_propagator import ColumnPropagator as ColumnPropagator
    from backpack_core.contract.columns import Columns as Columns
    from backpack_core.contract.extension import Extension as Extension
    from backpack_core.contract.extension import FirstOrderExtension as FirstOrderExtension
    from backpack_core.contract.extension import SecondOrderExtension as SecondOrderExtension
    from backpack_core.contract.graph_extension import GraphExtension as GraphExtension
    from backpack_core.contract.graph_extension import GraphReading as GraphReading
    from backpack_core.contract.graph_extension import LossGraph as LossGraph
    from backpack_core.contract.hook import hookimpl as hookimpl
    from backpack_core.contract.lookup import LookupProduct as LookupProduct
    from backpack_core.contract.loss import LossRule as LossRule
    from backpack_core.contract.operations import Operation as Operation
    from backpack_core.contract.parametric import AffinePairsRule as AffinePairsRule
    from backpack_core.contract.parametric import AffineRule as AffineRule
    from backpack_core.contract.parametric import ParametricRule as ParametricRule
    from backpack_core.contract.parametric import ProductRule as ProductRule
    from backpack_core.contract.product import DenseProduct as DenseProduct
    from backpack_core.contract.product import SampleProduct as SampleProduct
    from backpack_core.contract.product import SumProduct as SumProduct
    from backpack_core.contract.propagator import Propagator as Propagator
    from backpack_core.contract.rules import ElementwiseRule as ElementwiseRule
    from backpack_core.contract.rules import LayerRule as LayerRule
    from backpack_core.contract.scale import ScaleProduct as ScaleProduct
    from backpack_core.extending import extend as extend
    from backpack_core.extending import is_extended as is_extended
    from backpack_core.extending import unextend as unextend
    from backpack_core.fields import quantities as quantities
    from backpack_core.plugins.loading import prefer as prefer
    from backpack_core.plugins.registration import register as register
    from backpack_core.plugins.registration import unregister as unregister
    from backpack_core.record.switch import disable as disable
    from backpack_core.record.view import View as View
    from backpack_core.tuning import memory_budget as memory_budget
    from backpack_core.tuning import set_memory_budget as set_memory_budget

# The same names by their homes; a test compares the two lists.
_HOMES = {
    "context": "backpack",
    "contract.affine": "AffineProduct",
    "contract.column_propagator": "ColumnPropagator",
    "contract.columns": "Columns",
    "contract.extension": "Extension FirstOrderExtension SecondOrderExtension",
    "contract.graph_extension": "GraphExtension GraphReading LossGraph",
    "contract.hook": "hookimpl",
    "contract.lookup": "LookupProduct",
    "contract.loss": "LossRule",
    "contract.operations": "Operation",
    "contract.parametric": "AffinePairsRule AffineRule ParametricRule ProductRule",
    "contract.product": "DenseProduct SampleProduct SumProduct",
    "contract.propagator": "Propagator",
    "contract.rules": "ElementwiseRule LayerRule",
    "contract.scale": "ScaleProduct",
    "plugins.loading": "prefer",
    "plugins.registration": "register unregister",
    "fields": "quantities",
    "record.switch": "disable",
    "record.view": "View",
    "extending": "extend is_extended unextend",
    "tuning": "memory_budget set_memory_budget",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    # Names are loaded when they are asked for: pytest imports this package in every run in which it
    # is installed, which must not cost the seconds that importing torch takes.
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
