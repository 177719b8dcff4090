"""Everything public, which users import from :mod:`backpack_core`."""

from backpack_core import extensions as extensions
from backpack_core.context import backpack as backpack
from backpack_core.contract.extension import Extension as Extension
from backpack_core.contract.propagator import Propagator as Propagator
from backpack_core.contract.propagator import Reading as Reading
from backpack_core.contract.rules import LayerRule as LayerRule
from backpack_core.contract.rules import LossRule as LossRule
from backpack_core.extending import extend as extend
from backpack_core.extending import is_extended as is_extended
from backpack_core.extending import unextend as unextend
from backpack_core.fields import quantities as quantities
from backpack_core.plugins.hookspecs import hookimpl as hookimpl
from backpack_core.plugins.loading import prefer as prefer
from backpack_core.plugins.registration import register as register
from backpack_core.plugins.registration import unregister as unregister
from backpack_core.record.switch import disable as disable
from backpack_core.record.view import View as View
