"""The converter of the core, under the incumbent's names."""

from __future__ import annotations

from torch.fx import GraphModule
from torch.nn import Module

from backpack_compat.converter import RuleTracer, convert


class BackpackTracer(RuleTracer):
    """A tracer that leaves modules with a layer rule, and helper modules, whole."""


def convert_module_to_backpack(module: Module, debug: bool) -> GraphModule:
    """Rewrite functions and methods of a network as modules.

    Args:
        module: The network.
        debug: Log what is converted.
    """
    return convert(module, debug)
