"""Our forward hook before those that torch calls for all modules.

Torch runs these before the hooks of each module, and they may change what the module returned. That
counts as an operation outside the module.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from torch.nn import Module
from torch.nn.modules import module as torch_module

from backpack_core._hooks import HOOKS_OF_ALL
from backpack_core.record.execution import Execution

# Our keys among global hooks, which share a table of options with the hooks of single modules.
_keys_of_all = count(-3, -1)


class PlaceOfAll:
    """Keeps a hook before all global forward hooks, for as long as this object lives.

    It belongs to an execution. If an exception ends the execution, the object is freed with it, and
    the hook is removed.
    """

    __slots__ = ("_key",)

    def __init__(self, after: Callable[..., Any]) -> None:
        """Put it there.

        Args:
            after: The forward hook that records a call.
        """

        def hook(module: Module, args: Any, kwargs: Any, result: Any) -> Any:
            return after(module, args, kwargs, result) if type(kwargs) is Execution else None

        self._key = next(_keys_of_all)
        torch_module._global_forward_hooks_with_kwargs[self._key] = True
        HOOKS_OF_ALL[self._key] = hook
        HOOKS_OF_ALL.move_to_end(self._key, last=False)

    def __del__(self) -> None:
        HOOKS_OF_ALL.pop(self._key, None)
        torch_module._global_forward_hooks_with_kwargs.pop(self._key, None)
