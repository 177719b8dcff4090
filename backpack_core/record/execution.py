"""An execution of a module that has begun, and what of its inputs a call may store.

Only before the forward can one see where the inputs came from; only after it, what became of them.
A call must not hold the nodes of its own outputs, which would be a cycle, so some inputs are
replaced.
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
    """The keyword arguments of a module, with what is known before the forward only.

    It takes the place of the module's keyword arguments. So what was noted belongs to this
    execution, and not to another one of the same module (in another thread, or inside of this one),
    and goes with it.

    Attributes:
        tensors: The tensors among all arguments.
        versions: How often each had been changed in place.
        edges: Where each came from.
        is_recorded: Whether its call has been made.
        computed: Parameters that parametrizations computed for this execution, by name.
        place: What holds our place before the hooks of all modules, if there are any.
    """

    __slots__ = ("computed", "edges", "is_recorded", "place", "tensors", "versions")
    is_rewired = False  # :class:`Received` finds it out where that is in doubt
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
        """Copies and pickles, which hooks of users may make, are plain dicts."""
        return dict, (dict(self),)


class Received:
    """The inputs of an execution, in a form that a call may store.

    Attributes:
        edges: Where each input came from.
        versions: How often each had been changed in place.
        replaced: The tensor that is stored instead of an input, by ``id`` of the input.
        is_rewired: Whether the module changed a view in place; see :class:`Call`.
    """

    def __init__(
        self, execution: Execution, outputs: tuple[Tensor, ...], own: Iterable[Tensor]
    ) -> None:
        """Begin.

        Args:
            execution: What was known before the forward.
            outputs: What the module returned.
            own: The views that some outputs were replaced by.
        """
        self._execution = execution
        self._nodes = [node for o in outputs if (node := o.grad_fn) is not None]
        self._bases = [base for o in (*outputs, *own) if (base := base_of(o)) is not None]
        self.edges: tuple[Edge | None, ...] = ()
        self.versions: list[int] = []
        self.replaced: dict[int, Tensor] = {}
        self.is_rewired = False

    def store(self, tensor: Tensor) -> Tensor:
        """The input, or what is stored instead; notes its edge and version."""
        edge, version = edge_of(tensor), version_of(tensor)
        is_own = tensor.grad_fn in self._nodes
        was, known = (edge, version), self._execution
        for slot, other in enumerate(known.tensors):
            if other is tensor:
                was = known.edges[slot], known.versions[slot]
                break
        else:  # a pre-hook of the user's that ran after ours replaced an argument
            if is_own:  # the module rewrote it, and its edge before is unknown
                was, self.is_rewired = (None, -1), True
        if is_own and edge != was[0]:
            # The module rewrote its input; the pre-hook has seen where that came from.
            self.is_rewired |= base_of(tensor) is not None and version != was[1]
            tensor = self._replace(tensor, tensor.detach())
        elif edge is not None and self._bases and self._is_seen(tensor):
            # An in-place change of the output would rewrite the input's node, too.
            tensor = self._replace(tensor, _Twin.apply(tensor))  # type: ignore[no-untyped-call]
        self.edges = (*self.edges, was[0])
        self.versions.append(was[1])
        return tensor

    def _replace(self, tensor: Tensor, by: Tensor) -> Tensor:
        self.replaced[id(tensor)] = by
        return by

    def _is_seen(self, tensor: Tensor) -> bool:
        """Whether an output is a view of a tensor, or of its base."""
        base = base_of(tensor)
        return any(seen is tensor or seen is base for seen in self._bases)


class _Twin(torch.autograd.Function):
    """The same memory with a node of its own, which in-place changes of others do not rewrite."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Detach, so that autograd takes the result for no view."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Hand on the gradient."""
        return grad


def is_recordable(output: Tensor) -> bool:
    """Whether a call can be recorded at a tensor: it has a node, and is dense or nested."""
    return output.grad_fn is not None and output.layout in (torch.strided, torch.jagged)


def simple_node(
    args: tuple[Any, ...], result: Any, execution: Execution
) -> tuple[Node, Tensor | None] | None:
    """The node of the output in the usual case: one new real tensor, made from others.

    Then nothing was replaced or rewritten, and what was noted before the forward is all there is to
    store.

    Returns:
        The node, and the tensor that the output is a view of, if the module made that, too.
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
    """The base of an output that is a view, if the module made that base with a node."""
    base = view._base
    for tensor in received:
        if base is tensor or base is base_of(tensor):
            return None  # the call that made the base is recorded there
    return None if base is None or base.grad_fn is None else base


def aliases(live: list[Tensor], execution: Execution) -> dict[int, Tensor]:
    """Views to return instead of outputs that share their node with something else.

    A module may return its input, or what a module inside returned; and one of several outputs may
    depend on another. Every output has to be visited by itself, with its own gradient.

    Args:
        live: The outputs that lie in the graph.
        execution: What was noted before the forward.
    """
    found: dict[int, Tensor] = {}
    for output in live:
        edge = edge_of(output)
        assert edge is not None
        if len(live) > 1 or edge in execution.edges or site_at(edge) is not None:
            view = output.view_as(output)
            # Also of axes of length one: torch refuses to write one into the other if they differ.
            is_same = view.stride() == output.stride()
            found[id(output)] = view if is_same else output[...]
    return found
