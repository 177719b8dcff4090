"""What the hooks know of a module while it runs, and which of its inputs a call may store.

The edges of inputs are known only before the forward, because an in-place module rewrites them.
What became of the inputs is known only after it. A call must not refer to the nodes of its own
outputs, so some inputs are replaced before they are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from backpack_core._torch import Node, base_of, version_of, versions_of
from backpack_core.record.call import SITES, Edge, edge_of, site_at

_STRIDED = torch.strided


class Execution(dict[str, Any]):
    """The keyword arguments of a running module, with attributes that are known before its forward.

    The pre-hook returns it in place of the keyword arguments. So it belongs to this execution
    alone, and not to another one of the same module (in another thread, or nested), and is freed
    with it.

    Attributes:
        tensors: The tensors among all arguments.
        versions: Their version counters.
        edges: Their edges.
        is_recorded: Whether the call has been made.
        computed: Parameters that parametrizations computed for this execution, by name.
        place: The registration of our hook before global forward hooks, if there are any.
    """

    __slots__ = ("computed", "edges", "is_recorded", "place", "tensors", "versions")
    is_rewired = False  # in the usual case; :class:`Received` finds out in all others
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


class Received:
    """The inputs of an execution, in a form that a call may store.

    Attributes:
        edges: The edge of each input before the forward.
        versions: The version counter of each input before the forward.
        replaced: The tensor to store instead of an input, by ``id`` of the input.
        is_rewired: Whether the module changed a view in place; see :class:`Call`.
    """

    def __init__(
        self, execution: Execution, outputs: tuple[Tensor, ...], views: Iterable[Tensor]
    ) -> None:
        """Take what is needed to tell which inputs have to be replaced.

        Args:
            execution: What was known before the forward.
            outputs: The tensors that the module returned.
            views: The views that are returned instead of some outputs; see :func:`aliases`.
        """
        self._execution = execution
        self._nodes = [node for o in outputs if (node := o.grad_fn) is not None]
        self._bases = [base for o in (*outputs, *views) if (base := base_of(o)) is not None]
        self.edges: tuple[Edge | None, ...] = ()
        self.versions: list[int] = []
        self.replaced: dict[int, Tensor] = {}
        self.is_rewired = False

    def store(self, tensor: Tensor) -> Tensor:
        """The input, or the tensor to store instead; appends its edge and version."""
        edge, version = edge_of(tensor), version_of(tensor)
        is_own = tensor.grad_fn in self._nodes
        before, execution = (edge, version), self._execution
        for slot, other in enumerate(execution.tensors):
            if other is tensor:
                before = execution.edges[slot], execution.versions[slot]
                break
        else:  # a pre-hook of the user's that ran after ours replaced an argument
            if is_own:  # the module rewrote it, and its edge before the forward is unknown
                before, self.is_rewired = (None, -1), True
        if is_own and edge != before[0]:
            # The module changed its input in place: the tensor has the edge of the output now.
            self.is_rewired |= base_of(tensor) is not None and version != before[1]
            tensor = self._replace(tensor, tensor.detach())
        elif edge is not None and self._bases and self._is_seen(tensor):
            # The output is a view of the input, so that an in-place change of the output would
            # rewrite the input's node, too.
            tensor = self._replace(tensor, _Twin.apply(tensor))  # type: ignore[no-untyped-call]
        self.edges = (*self.edges, before[0])
        self.versions.append(before[1])
        return tensor

    def _replace(self, tensor: Tensor, by: Tensor) -> Tensor:
        self.replaced[id(tensor)] = by
        return by

    def _is_seen(self, tensor: Tensor) -> bool:
        """Whether an output is a view of a tensor, or of its base."""
        base = base_of(tensor)
        return any(seen is tensor or seen is base for seen in self._bases)


class _Twin(torch.autograd.Function):
    """An alias with its own autograd node, which in-place changes of others do not rewrite."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Detach, so that autograd does not treat the result as a view of the input."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Pass the gradient on."""
        return grad


def is_recordable(output: Tensor) -> bool:
    """Whether a call can be recorded at a tensor: it has a node, and is dense or nested."""
    return output.grad_fn is not None and output.layout in (torch.strided, torch.jagged)


def simple_node(
    args: tuple[Any, ...], result: Any, execution: Execution
) -> tuple[Node, Tensor | None] | None:
    """The node of the output in the usual case: one new real tensor, made from tensors.

    Nothing was replaced or rewritten then, so what was known before the forward is what is stored.

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


def aliases(live: list[Tensor], execution: Execution) -> dict[int, Tensor]:
    """Views to return instead of outputs whose edge is that of an input or of another call.

    A module may return its input, or what a submodule returned; and one of several outputs may
    depend on another. Every output is visited by itself, with its own gradient, so it needs an edge
    of its own.

    Args:
        live: The outputs that have a graph.
        execution: What was known before the forward.

    Returns:
        The views, by ``id`` of the outputs that they replace.
    """
    views: dict[int, Tensor] = {}
    for output in live:
        edge = edge_of(output)
        assert edge is not None
        if len(live) > 1 or edge in execution.edges or site_at(edge) is not None:
            view = output.view_as(output)
            # ``view_as`` may give axes of length one other strides, and torch refuses to copy
            # between tensors that differ in these.
            is_same = view.stride() == output.stride()
            views[id(output)] = view if is_same else output[...]
    return views
