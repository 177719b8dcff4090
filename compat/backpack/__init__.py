"""The names of ``backpack-for-pytorch`` 1.7, on ``backpack-core``.

Scripts and packages written for it run unchanged:

    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact

This package holds names and adapters; every number comes from ``backpack_core`` and its plugins.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import cast

from torch.nn import Module

from backpack import extensions as extensions
from backpack.context import CTX as CTX
from backpack.custom_module.graph_utils import convert_module_to_backpack
from backpack.debugging import Printer
from backpack.extensions.backprop_extension import BackpropExtension as BackpropExtension
from backpack.presence import warn_about_incumbent
from backpack.storage import HookWithIO, hook_store_io, memory_cleanup, store_io
from backpack_compat.converter import convert
from backpack_core import __version__ as __version__
from backpack_core import context as contexts
from backpack_core import disable as _disable
from backpack_core._torch import graph_task_id
from backpack_core.contract.extension import Extension
from backpack_core.engine.active import logger
from backpack_core.errors import BackpackWarning, NotExtendedError
from backpack_core.extending import M
from backpack_core.extending import extend as _extend
from backpack_core.record.switch import is_disabled
from backpack_core.record.view import View
from backpack_products.computing import declare_only_computes

declare_only_computes(__name__)

_PRINTER = Printer(logger)

__all__ = [
    "backpack",
    "convert_module_to_backpack",
    "disable",
    "extend",
    "extensions",
    "hook_store_io",
    "memory_cleanup",
]


class backpack(contexts.backpack):
    """Activate extensions for the backward passes inside a ``with`` block."""

    def __init__(
        self,
        *exts: Extension,
        extension_hook: Callable[[Module], None] | None = None,
        debug: bool = False,
        retain_graph: bool = False,
    ) -> None:
        """Store the request.

        Args:
            exts: Extensions to run.
            extension_hook: Called with each module after all extensions ran on it;
                ``module.input0``, …, and ``module.output`` are those of the visited call.
            debug: Print every step, and check at every module that samples do not mix.
            retain_graph: Keep inputs and outputs for another backward pass.
        """
        hook = None if extension_hook is None else HookWithIO(extension_hook, self._visiting)
        super().__init__(*exts, extension_hook=hook, debug=debug, retain_graph=retain_graph)
        self.exts = exts
        self.debug = debug
        self.extension_hook = extension_hook
        self.retain_graph = retain_graph

    def __enter__(self) -> backpack:
        """Make this the active context of the thread."""
        super().__enter__()
        if self.debug:
            _PRINTER.begin()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the block. If nothing was computed in it, warn, where the core would raise."""
        if self.debug:
            _PRINTER.end()
        try:
            super().__exit__(exc_type, exc, traceback)
        except NotExtendedError as error:
            warnings.warn(str(error), BackpackWarning, stacklevel=2)

    def _visiting(self) -> View | None:
        """The call that the backward pass visits now."""
        for context in self._entered:
            current_pass = context.passes.get(graph_task_id())
            if current_pass is not None:
                view: View | None = current_pass.visiting
                return view
        return None


class disable(_disable):
    """Record nothing in forward passes inside this ``with`` block."""

    @staticmethod
    def should_store_io() -> bool:
        """Whether forward passes record inputs and outputs."""
        return not is_disabled()


def extend(module: M, debug: bool = False, use_converter: bool = False) -> M:
    """Let active extensions compute quantities for a module and all modules in it.

    Args:
        module: A model, a layer, or a loss function.
        debug: Print what is extended.
        use_converter: Rewrite the model into modules with ``torch.fx`` first.

    Returns:
        The same object, unless it was converted.
    """
    if debug:
        print("[DEBUG] Extending", module)
    if use_converter:
        module = cast(M, convert(module))
    module = _extend(module, debug=debug)
    store_io(module)
    return module


warn_about_incumbent()
