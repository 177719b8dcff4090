"""Module extensions: a quantity written by hand for one pair (extension, module type).

They are the incumbent's way to support a layer. A layer rule is shorter and serves every extension.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.nn import Module

from backpack_compat.hand_written import HandWrittenCarrier
from backpack_core import Extension, Propagator


class ModuleExtension:
    """Computes the quantity of one extension for one type of module.

    A subclass has a method for each parameter in ``params``, called as ``(extension, module, g_inp,
    g_out, bpQuantities)``. A second-order one overrides :meth:`backpropagate`; what that returns
    goes to every input of the module. ``module.input0``, ``module.input1``, … and ``module.output``
    are set while it runs. An extension of the core accepts one, too:
    ``extension.carriers[ModuleType] = module_extension.carrier``.
    """

    def __init__(self, params: list[str] | None = None) -> None:
        """Store the parameter names.

        Args:
            params: Names of the parameters.

        Raises:
            NotImplementedError: A parameter has no method.
        """
        self.params = [] if params is None else params
        for param in self.params:
            if not hasattr(self, param):
                raise NotImplementedError(
                    f"The module extension {type(self).__name__} has no method for {param!r}: "
                    f"write {param}(extension, module, g_inp, g_out, bpQuantities)."
                )

    def carrier(self, extension: Extension, propagator: Propagator) -> HandWrittenCarrier:
        """What replaces the layer rule, in one backward pass."""
        return HandWrittenCarrier(self, extension, propagator)

    def check(self, ext: Any, module: Module, g_inp: Any, g_out: Any) -> None:
        """See :meth:`check_hyperparameters_module_extension`."""
        self.check_hyperparameters_module_extension(ext, module, g_inp, g_out)

    def check_hyperparameters_module_extension(
        self, ext: Any, module: Module, g_inp: Any, g_out: Any
    ) -> None:
        """Raise an error if the module's settings are not supported; by default all are."""

    def backpropagate(
        self, extension: Any, module: Module, g_inp: Any, g_out: Any, bpQuantities: Any
    ) -> Any:
        """The quantity at the inputs, from that at the output. Default: ``None``, and a warning."""
        warnings.warn("Backpropagate has not been overwritten", stacklevel=2)
