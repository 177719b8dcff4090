"""Lets a selective checkpoint compute its tensors again more than once.

Such a checkpoint keeps the results of some operations, and drops each when it computes the others
again. But a quantity may need them for a pass of its own: second derivatives, and products with the
curvature. So what is kept stays until the graph is freed, for checkpoints that compute again while
any thread is in a block, and from then on. Results that the checkpoint lets others change in place
(``allow_cache_entry_mutation``) are dropped as always.

Other code of torch finds the class of the mode in tables, so no subclass can take its place.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from backpack_core.engine.active import stacks

_Mode: Any = getattr(torch_checkpoint, "_CachedTorchDispatchMode", None)
_KEPT = "_backpack_kept"  # attribute of a mode: what its storage held when it was entered


def let_results_stay() -> None:
    """Have all selective checkpoints keep their results, as this file says."""
    if _Mode is None or hasattr(_Mode, _KEPT):
        return
    enter, leave = _Mode.__enter__, _Mode.__exit__

    def entered(self: Any) -> Any:
        if (stacks or getattr(self, _KEPT)) and not self.allow_cache_entry_mutation:
            setattr(self, _KEPT, {key: copy(found) for key, found in self.storage.items()})
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        self.storage.update(getattr(self, _KEPT) or {})
        return leave(self, *error)

    setattr(_Mode, _KEPT, None)
    _Mode.__enter__, _Mode.__exit__ = entered, left
