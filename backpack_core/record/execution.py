"""What the hooks know of a module while it runs.

The edges of inputs are known only before the forward, because an in-place module rewrites them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node, base_of, versions_of
from backpack_core.record.call import SITES, edge_of

_STRIDED = torch.strided


class Execution(dict[str, Any]):
    """The keyword arguments of a running module, with attributes that are known before its forward.

    The pre-hook returns it instead of the keyword arguments. So it belongs to this execution alone,
    and not to another one of the same module (in another thread, or nested), and is freed with it.

    Attributes:
        tensors: The tensors among all arguments.
        versions: Their version counters.
        edges: Their edges.
        is_recorded: Whether the call has been made.
        computed: Parameters that parametrizations computed for this execution, by name.
        place: The registration of our hook before global forward hooks, if there are any.
    """

    __slots__ = ("computed", "edges", "is_recorded", "place", "tensors", "versions")
    is_rewired = False  # in the usual case; a library finds out in all others
    place: object

    def __init__(self, kwargs: dict[str, Any], tensors: tuple[Tensor, ...]) -> None:
        if kwargs:
            self.update(kwargs)
        self.tensors = tensors
        self.edges = tuple(map(edge_of, tensors))
        self.versions = versions_of(tensors)
        self.is_recorded = False
        self.computed: dict[str, Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, which users' hooks may make, are plain dicts."""
        return dict, (dict(self),)


def simple_node(
    args: tuple[Any, ...], result: Any, execution: Execution
) -> tuple[Node, Tensor | None] | None:
    """The node of the output in the usual case: one new real tensor, made from tensors.

    In this case nothing was replaced or rewritten, so what was known before the forward is stored.

    Returns:
        The node, and the base of the output if it is a view and the module made the base, too.
        ``None`` if the case is not the usual one.
    """
    # If all arguments are tensors, ``tensors`` is the tuple of arguments itself. There may still be
    # keywords, from a hook that was just put behind ours.
    if args is not execution.tensors or execution or not args or not isinstance(result, Tensor):
        return None
    node: Any = result.grad_fn
    base = result._base
    if (
        node is None
        or result.layout is not _STRIDED
        or result.is_complex()
        or SITES in node.metadata
        or (base is not None and (base := new_base(result, args)) is None)
    ):
        return None
    for received, edge in zip(args, execution.edges):  # noqa: B905 - one for each, and quicker
        if node is received.grad_fn or (edge and node is edge[0]) or received.is_complex():
            return None
    return node, base


def new_base(view: Tensor, received: Iterable[Tensor]) -> Tensor | None:
    """The base of an output that is a view, if the module made the base and the base has a node."""
    base = view._base
    for tensor in received:
        if base is tensor or base is base_of(tensor):
            return None  # another call made the base, and is recorded there
    return None if base is None or base.grad_fn is None else base
