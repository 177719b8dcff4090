"""Puts our hooks at fixed places among those of others, through torch's tables of hooks.

Changes that users' hooks make count as operations outside the module. So our pre-hook runs last
before the forward, and our hook first after it. Imports ``_torch`` only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as torch_module

from backpack_core._torch import Node

# The key of our hooks. Torch's own keys count up from zero in every process. So a key of torch that
# was pickled with a module could be given out a second time.
KEY = -1
# The key of the hooks of an extended model, which it has in addition to those of a module.
MODEL_KEY = -2
# The global forward hooks, which torch runs before those of each module.
HOOKS_OF_ALL: Any = torch_module._global_forward_hooks


class _Hooks(dict[int, Any]):
    """The table of a tensor's hooks; handles that torch gives out refer to it weakly."""

    __slots__ = ("__weakref__",)


def hook_first(output: Tensor, node: Node, hook: Any, is_new: bool) -> dict[int, Any]:
    """Put a tensor hook before all others of a tensor, and return the table of its hooks.

    Args:
        output: The tensor.
        node: Its ``grad_fn``.
        hook: Called with the gradient.
        is_new: Whether the node has no hook of ours yet.
    """
    table: dict[int, Any] | None = output._backward_hooks
    # In-place operations on views, and those that change axes (squeeze_), leave a tensor the table
    # of its former node, which has our key already.
    if table is None or (is_new and KEY in table):
        # This is Tensor.register_hook without its checks, which take nine tenths of its time.
        output._backward_hooks = table = _Hooks()
        table[KEY] = hook
        node._register_hook_dict(output)
    else:
        table[KEY] = hook
        move_first(table, KEY)
    return table


def move_first(table: dict[int, Any], key: int) -> None:
    """Make a key the first of a table of tensor hooks.

    The table is filled anew: autograd does not see the order that ``move_to_end`` makes.
    """
    others = [(other, hook) for other, hook in table.items() if other != key]
    hook = table[key]
    table.clear()
    table[key] = hook
    table.update(others)


def install(module: Module, before: Any, after: Any, key: Any = KEY) -> None:
    """Put our two hooks into the tables of a module.

    This is ``register_forward_pre_hook(..., with_kwargs=True)`` and
    ``register_forward_hook(..., with_kwargs=True, always_call=True)``, but under our own keys.
    """
    module._forward_pre_hooks[key] = before
    module._forward_pre_hooks_with_kwargs[key] = True
    module._forward_hooks[key] = after
    module._forward_hooks_with_kwargs[key] = True
    module._forward_hooks_always_called[key] = True


def remove(module: Module) -> None:
    """Remove our hooks from a module."""
    for table in (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ):
        table.pop(KEY, None)
        table.pop(MODEL_KEY, None)


def are_installed(module: Module) -> bool:
    """Whether our hooks are in the tables of a module."""
    return KEY in module._forward_hooks


def take_places(module: Module) -> bool:
    """Make our pre-hook the last and our hook the first; false if our hooks were removed."""
    before: Any = module._forward_pre_hooks
    after: Any = module._forward_hooks
    if KEY not in after:
        return False
    # Unpacking reads the table in one go, since another thread may add hooks meanwhile.
    if len(after) > 1:
        first, *_ = after
        if first != KEY:
            after.move_to_end(KEY, last=False)
    if len(before) > 1:
        *_, last = before
        if last != KEY:
            before.move_to_end(KEY)
    return True
