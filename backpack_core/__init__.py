"""More than the gradient during ``loss.backward()``: a small core, and plugins for everything else.

from backpack_core import backpack, extend
from backpack_core.extensions import DiagGGNExact

model, lossfunc = extend(model), extend(lossfunc)
loss = lossfunc(model(X), y)
with backpack(DiagGGNExact()):
loss.backward()
"""

__version__ = "0.1.0"

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
from backpack_core.module_extension import FirstOrderModuleExtension as FirstOrderModuleExtension
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
from backpack_core.rules import LossRule as LossRule
from backpack_core.rules import ParametricRule as ParametricRule
